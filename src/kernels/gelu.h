#pragma once

#include "src/kernels/gelu_kernel.h"

#include <ATen/core/Tensor.h>

// The Gaussian error linear unit of z = input + bias. gelu_kernel.h defines its two forms, erf and
// tanh.
//
// An input is floating-point, of any layout and device. A bias is undefined, or has one element of
// any floating dtype for each position in the input's last dimension. Elements are computed in fp32
// (fp64 for an fp64 input) and rounded once: input + bias is not rounded to 16 bits in between.
//
// Relative errors of the vector code, compared with fp64 before the result is rounded, over every
// fp16 and bf16 number and 6.6 million fp32 numbers:
//
//                      erf             tanh
//   z >= -1            3e-7            3e-7
//   -5 <= z < -1       1e-6            2e-6      (the exponential's argument is rounded)
//   -10 <= z < -5      5e-6            1.3e-5
//
// For 16-bit inputs the error of erf is 5e-6 for z >= -7, and 2 % at -9. Below -9, values are under
// 1e-18 and may be 0. Derivatives have an error of 2e-7.
namespace semitone::kernels {

// The result has the input's strides if the input has no gaps and there is no bias; otherwise it is
// contiguous.
at::Tensor gelu(const at::Tensor& input, const at::Tensor& bias, GeluForm form);

// The gradients of the input and, if requested, of the bias, in their dtypes. The bias's gradient
// is a sum over all dimensions but the last. It is accumulated in fp32 for at most 256 terms at a
// time, and these partial sums are added in fp64.
struct GeluGradients {
  at::Tensor input;
  at::Tensor bias;
};
GeluGradients gelu_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& bias,
                            GeluForm form, bool bias_wanted);

namespace ref {
// The reference implementations, composed of ATen operators. The first can be differentiated.
at::Tensor gelu(const at::Tensor& input, const at::Tensor& bias, GeluForm form);
GeluGradients gelu_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& bias,
                            GeluForm form, bool bias_wanted);
}  // namespace ref

}  // namespace semitone::kernels
