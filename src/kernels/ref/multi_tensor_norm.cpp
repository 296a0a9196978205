#include "src/kernels/multi_tensor_norm.h"

#include <torch/types.h>

#include <cmath>

namespace semitone::kernels::ref {

at::Tensor norm(const at::Tensor& tensor, double p) {
  const at::NoGradGuard no_grad;
  const at::Tensor magnitude = tensor.to(at::kDouble).abs();
  if (tensor.numel() == 0) return at::zeros({}, magnitude.options());
  if (std::isinf(p)) return magnitude.max();
  if (p == 2) return magnitude.square().sum().sqrt();
  return magnitude.pow(p).sum().pow(1 / p);
}

}  // namespace semitone::kernels::ref
