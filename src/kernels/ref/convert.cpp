#include "src/kernels/convert.h"

#include <torch/types.h>

namespace semitone::kernels::ref {

at::Tensor convert(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.to(dtype, /*non_blocking=*/false, /*copy=*/true);
}

at::Tensor round_to(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.to(dtype).to(at::kFloat);
}

}  // namespace semitone::kernels::ref
