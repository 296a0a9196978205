#include "src/kernels/fp8.h"

#include "src/core/dtype_limits.h"

#include <torch/types.h>

#include <limits>

namespace semitone::kernels::ref {

Fp8Values to_fp8(const at::Tensor& tensor, at::ScalarType format, float scale) {
  const at::NoGradGuard no_grad;
  const double max = dtype_limits(format).max;
  const at::Tensor wide = tensor.detach().to(at::kFloat);
  const at::Tensor scaled = wide * scale;
  const at::Tensor kept = scaled.clamp(-max, max).to(format).to(at::kFloat);
  const at::Tensor others = format == at::kFloat8_e5m2
                                ? scaled
                                : at::full_like(scaled, std::numeric_limits<float>::quiet_NaN());
  return {at::where(wide.isfinite(), kept, others), ref::finite_amax(tensor)};
}

float finite_amax(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  const at::NoGradGuard no_grad;
  const at::Tensor wide = tensor.detach().to(at::kFloat);
  return at::where(wide.isfinite(), wide.abs(), 0.0).max().item<float>();
}

}  // namespace semitone::kernels::ref
