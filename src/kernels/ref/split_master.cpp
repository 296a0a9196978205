#include "src/kernels/multi_tensor_update.h"

#include <torch/types.h>

#include <algorithm>
#include <cstdint>

namespace semitone::kernels {

// The arithmetic of rounding.h's split_fp32 and join_fp32 on whole tensors, in int32. Shifts of
// negative int32 keep the sign; the conversion to int16 drops the upper bits.
at::Tensor join_split_master(const at::Tensor& param, const at::Tensor& low) {
  const at::NoGradGuard no_grad;
  const at::Tensor high = param.detach().contiguous().view(at::kShort).to(at::kInt);
  const at::Tensor bits = high.mul(1 << 16);
  const at::Tensor below_zero = high.bitwise_and(0x7FFF).eq(0).logical_and(low.lt(0));
  return at::where(below_zero, bits, bits.add(low.to(at::kInt))).view(at::kFloat);
}

void split_master(const at::Tensor& value, const at::Tensor& param, const at::Tensor& low) {
  const at::NoGradGuard no_grad;
  // Split recursively into halves, since temporaries take 16 bytes per element.
  constexpr std::int64_t kMost = 1 << 20;
  if (value.numel() > kMost) {
    const auto largest = std::max_element(value.sizes().begin(), value.sizes().end());
    const auto dim = largest - value.sizes().begin();
    const std::int64_t half = *largest / 2;
    const auto split_part = [&](std::int64_t begin, std::int64_t size) {
      split_master(value.narrow(dim, begin, size), param.narrow(dim, begin, size),
                   low.narrow(dim, begin, size));
    };
    split_part(0, half);
    split_part(half, *largest - half);
    return;
  }
  const at::Tensor bits = value.detach().contiguous().view(at::kInt);
  const at::Tensor quiet = bits.bitwise_or(0x400000).bitwise_and(-0x10000);
  const at::Tensor number = at::where(value.isnan(), quiet, bits);
  low.copy_(number.to(at::kShort));
  param.copy_(number.add(0x8000).__rshift__(16).to(at::kShort).view(at::kBFloat16));
}

}  // namespace semitone::kernels
