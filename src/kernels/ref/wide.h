#pragma once

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>

namespace semitone::kernels::ref {

// The dtype in which LibTorch computes: fp32 for 16 bits.
inline at::Tensor wide(const at::Tensor& tensor) {
  return tensor.to(at::toOpMathType(tensor.scalar_type()));
}

}  // namespace semitone::kernels::ref
