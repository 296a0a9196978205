#include "src/kernels/missing_kernels.h"

#include "src/core/log.h"

#include <atomic>
#include <cstdint>

namespace semitone::kernels {

void warn_of_missing_kernels(int device, std::string_view reason) {
  static std::atomic<std::uint64_t> said = 0;  // a bit for each device
  const std::uint64_t bit = std::uint64_t{1} << (device & 63);
  if ((said.load(std::memory_order_relaxed) & bit) != 0 || (said.fetch_or(bit) & bit) != 0) return;
  log()->warn(
      "CUDA device {} has none of Semitone's kernels: {}; until then its fused optimizers and "
      "layers use LibTorch's operators, which are several times slower",
      device, reason);
}

}  // namespace semitone::kernels
