#pragma once

#include "src/kernels/philox.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

// Dropout in one pass over memory. A seed determines the dropped elements, so the gradient needs
// nothing else.
namespace semitone::kernels {

// Which elements are dropped, and the factor of the others. Element i, in the order of the result's
// memory, has a random number of 16 bits that depends on the stream and i only. It is dropped if
// the number is less than the threshold.
class Dropout {
 public:
  // @param p  in [0, 1]: rounded to a multiple of 2^-16, and to 1 - 2^-16 if it is between that and
  //           1. The factor of the remaining elements is exact for the rounded p.
  Dropout(double p, PhiloxStream stream);

  const PhiloxStream& stream() const { return stream_; }
  // p = threshold / 2^16.
  std::uint32_t threshold() const { return threshold_; }
  // 1 / (1 - p), and 0 if p is 1.
  double scale() const;

 private:
  PhiloxStream stream_;
  std::uint32_t threshold_;
};

// residual + input * (0 or scale), computed in fp32 (fp64 if input or result are fp64) and rounded
// once to `dtype`. residual: undefined, or of the input's shape and of a dtype that converts to
// `dtype` exactly. The result is dense, and has the input's strides if the input is dense. Dropped
// infinities and NaNs become NaN, as in at::dropout. Works on any device, and in one pass for fp32,
// fp16 and bf16 on the CPU and with CUDA kernels.
at::Tensor dropout(const at::Tensor& input, const Dropout& dropout, at::ScalarType dtype,
                   const at::Tensor& residual = {});

namespace ref {
// The reference implementation, composed of ATen operators.
at::Tensor dropout(const at::Tensor& input, const Dropout& dropout, at::ScalarType dtype,
                   const at::Tensor& residual = {});
}  // namespace ref

}  // namespace semitone::kernels
