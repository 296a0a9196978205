#pragma once

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>

namespace semitone::kernels::ref {

// In the dtype that LibTorch computes in: fp32 for 16 bits.
inline at::Tensor wide(const at::Tensor& tensor) {
  return tensor.to(at::toOpMathType(tensor.scalar_type()));
}

}  // namespace semitone::kernels::ref
