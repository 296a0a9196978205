#include "src/autocast/custom_backward.h"

#include "semitone/core/device.h"

#include <ATen/autocast_mode.h>

#include <atomic>

namespace semitone::amp::custom_backward {
namespace {

// Such functions appear in every step once they have been seen. Process-wide, since it only costs
// time.
std::atomic<bool>& seen() {
  static std::atomic<bool> flag{false};
  return flag;
}

}  // namespace

bool& begun_with_gradients() {
  static thread_local bool flag = false;
  return flag;
}

void see_operator_without_gradients() {
  if (begun_with_gradients()) seen().store(true, std::memory_order_relaxed);
}

std::unique_ptr<Autocast> region_for(const at::Tensor& loss) {
  const auto device = loss.device().type();
  if (!seen().load(std::memory_order_relaxed) || !at::autocast::is_autocast_available(device) ||
      autocast_enabled(device))
    return nullptr;
  // Products of one dtype stay LibTorch's own, as they are in every other backward pass.
  return std::make_unique<Autocast>(CastPolicy::none({device, default_16bit_dtype(device)})
                                        .emulation(Emulation::never)
                                        .fast_kernels(false));
}

}  // namespace semitone::amp::custom_backward
