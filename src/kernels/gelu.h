#pragma once

#include "src/kernels/rows.h"

#include <ATen/core/Tensor.h>

// The Gaussian error linear unit of input + bias, both forms of which rows.h defines.
//
// An input is floating-point, of any layout and device; a bias is undefined, or has one element of
// any floating dtype for each position in the input's last dimension. Elements are computed in fp32,
// in fp64 if the input is fp64, and rounded once: input + bias is not rounded to 16 bits between.
//
// Relative errors of the vector code against fp64, over every fp16 and bf16 number and 6.6 million
// of fp32: for z >= -1, 3e-7; further out rounding the exponent counts:
// 7e-7 and 2e-6 from -5 on, 4.5e-6 and 1.2e-5 from -10 on (erf without fused multiplication and
// addition; with, 5e-7). Below, values are under 1e-22 and may be 0. Slopes are off by 2e-7.
namespace semitone::kernels {

// Laid out like the input if that has no gaps and there is no bias, else contiguous.
at::Tensor gelu(const at::Tensor& input, const at::Tensor& bias, GeluForm form);

// Of the input (of its dtype), and if wanted of the bias (of its dtype): the sums over all other
// dimensions, of at most 256 terms in fp32 before they go on in fp64.
struct GeluGradients {
  at::Tensor input;
  at::Tensor bias;
};
GeluGradients gelu_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& bias,
                            GeluForm form, bool bias_wanted);

namespace ref {
// The definitions, composed of ATen operators. The first can be differentiated.
at::Tensor gelu(const at::Tensor& input, const at::Tensor& bias, GeluForm form);
GeluGradients gelu_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& bias,
                            GeluForm form, bool bias_wanted);
}  // namespace ref

}  // namespace semitone::kernels
