#pragma once

#include "src/kernels/gelu_kernel.h"

#include <ATen/core/Tensor.h>

// The Gaussian error linear unit of input + bias, both forms of which gelu_kernel.h defines.
//
// An input is floating-point, of any layout and device. A bias is undefined, or has one element of
// any floating dtype for each position in the input's last dimension. Elements are computed in fp32
// (fp64 for an fp64 input) and rounded once: input + bias is not rounded to 16 bits in between.
//
// Errors of the vector code against fp64, over every fp16 and bf16 number and 6.6 million of fp32,
// before the result is rounded: for z >= -1, 3e-7 of the value; below, where rounding the exponent
// counts, 1e-6 (erf) and 2e-6 (tanh) down to -5, 5e-6 and 1.3e-5 down to -10. With a 16-bit input
// erf is off by 5e-6 down to -7, 2 % at -9. Beyond, values are under 1e-18 and may be 0. Slopes are
// off by 2e-7.
namespace semitone::kernels {

// The result has the input's strides if the input has no gaps and there is no bias; otherwise it is
// contiguous.
at::Tensor gelu(const at::Tensor& input, const at::Tensor& bias, GeluForm form);

// Gradients of the input (in its dtype), and if requested of the bias (in its dtype): the sums over
// all other dimensions, of at most 256 terms in fp32 before they continue in fp64.
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
