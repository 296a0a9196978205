#include "src/kernels/read_later.h"

#include "src/kernels/pinned.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/types.h>

#include <algorithm>

namespace semitone::kernels {

ReadLater::ReadLater(const at::Tensor& values)
    : host_(empty_for_copy(values.sizes(), at::kFloat, values.device())),
      event_(values.device().type()) {
  const at::NoGradGuard no_grad;
  host_.copy_(values, /*non_blocking=*/true);
  if (values.is_cpu()) return;
  event_.record(c10::impl::VirtualGuardImpl(values.device().type()).getStream(values.device()));
}

bool ReadLater::is_there() {
  is_there_ = is_there_ || event_.query();
  return is_there_;
}

const std::vector<float>& ReadLater::get() {
  if (host_.defined()) {
    if (!is_there()) event_.synchronize();
    is_there_ = true;
    const auto* const first = host_.const_data_ptr<float>();
    values_.assign(first, first + host_.numel());
    host_.reset();
  }
  return values_;
}

bool ReadLater::any_set() {
  const std::vector<float>& values = get();
  return std::any_of(values.begin(), values.end(), [](float value) { return value != 0; });
}

}  // namespace semitone::kernels
