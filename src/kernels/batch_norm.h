#pragma once

#include <ATen/core/Tensor.h>

// Batch normalisation in pieces, for a layer whose statistics do not come from one tensor alone.
//
// An input is (N, C, …), floating-point, in any layout and on any device; N may be 0. Per-channel
// values are fp64 of shape (C), on the input's device. Elements are computed in fp32, in fp64 if
// the input is fp64, and rounded once. In kernels a sum has at most 256 terms in fp32 before it
// goes on in fp64. What has an input's shape is dense if the input is, and then laid out like it.
// Results do not depend on the number of threads.
namespace semitone::kernels {

// Mean, and sum of the squared distances from it. Zeros where there are no elements.
struct Moments {
  at::Tensor mean;
  at::Tensor m2;
};

// Sums over what a channel has: of the gradient, and of gradient times (input - mean).
struct GradientSums {
  at::Tensor grad;
  at::Tensor grad_times_centred;
};

Moments moments(const at::Tensor& input);

// (input - mean) * scale + shift + residual, then relu if asked. residual: undefined, or of the
// input's shape.
at::Tensor normalize(const at::Tensor& input, const at::Tensor& mean, const at::Tensor& scale,
                     const at::Tensor& shift, const at::Tensor& residual, bool relu);

GradientSums gradient_sums(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean);

// (input - mean) * b + c + grad * a.
at::Tensor gradient_of_input(const at::Tensor& grad, const at::Tensor& input,
                             const at::Tensor& mean, const at::Tensor& a, const at::Tensor& b,
                             const at::Tensor& c);

namespace ref {
// The definitions, composed of ATen operators.
Moments moments(const at::Tensor& input);
at::Tensor normalize(const at::Tensor& input, const at::Tensor& mean, const at::Tensor& scale,
                     const at::Tensor& shift, const at::Tensor& residual, bool relu);
GradientSums gradient_sums(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean);
at::Tensor gradient_of_input(const at::Tensor& grad, const at::Tensor& input,
                             const at::Tensor& mean, const at::Tensor& a, const at::Tensor& b,
                             const at::Tensor& c);
}  // namespace ref

}  // namespace semitone::kernels
