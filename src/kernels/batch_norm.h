#pragma once

#include <ATen/core/Tensor.h>

// Batch normalisation in parts, for a layer whose statistics come from more than one tensor.
//
// An input is (N, C, …), floating-point, in any layout and on any device; N may be 0. Per-channel
// values are fp64 of shape (C), on the input's device. Elements are computed in fp32 (fp64 for an
// fp64 input) and rounded once. The kernels accumulate sums in fp32 for at most 256 terms at a
// time, and add these partial sums in fp64. If the input is dense, results of its shape have its
// strides. Results do not depend on the number of threads.
namespace semitone::kernels {

// Mean, and sum of squared deviations. Zeros if there are no elements.
struct Moments {
  at::Tensor mean;
  at::Tensor m2;
};

// Sums over the elements of a channel: of the gradient, and of gradient times (input - mean).
struct GradientSums {
  at::Tensor grad;
  at::Tensor grad_times_centred;
};

Moments moments(const at::Tensor& input);

// (input - mean) * scale + shift + residual, then relu if requested. residual: undefined, or of the
// input's shape.
at::Tensor normalize(const at::Tensor& input, const at::Tensor& mean, const at::Tensor& scale,
                     const at::Tensor& shift, const at::Tensor& residual, bool relu);

// The scale and shift of a normalize() with relu and without a residual. Where its result, computed
// again, is 0, the gradient is taken to be 0. Undefined: there was no relu.
struct BatchRelu {
  at::Tensor scale = {};
  at::Tensor shift = {};
};

GradientSums gradient_sums(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean,
                           const BatchRelu& relu = {});

// With relu and a residual, whose gradient is `grad` of the result: 0 where `result`, normalize()'s,
// is 0, in its dtype. The sums are those of this gradient.
struct MaskedGradient {
  at::Tensor grad;
  GradientSums sums;
};
MaskedGradient masked_gradient(const at::Tensor& grad, const at::Tensor& input,
                               const at::Tensor& mean, const at::Tensor& result);

// (input - mean) * b + c + grad * a. shift: undefined, or that of a normalize() with relu and
// without a residual, whose scale is a.
at::Tensor gradient_of_input(const at::Tensor& grad, const at::Tensor& input,
                             const at::Tensor& mean, const at::Tensor& a, const at::Tensor& b,
                             const at::Tensor& c, const at::Tensor& shift = {});

// Whether there are kernels for a batch: otherwise each of these functions consists of operators,
// and it is better to compute relu's gradient once.
bool has_batch_kernels(const at::Tensor& input);

namespace ref {
// The reference implementations, composed of ATen operators.
Moments moments(const at::Tensor& input);
at::Tensor normalize(const at::Tensor& input, const at::Tensor& mean, const at::Tensor& scale,
                     const at::Tensor& shift, const at::Tensor& residual, bool relu);
GradientSums gradient_sums(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean,
                           const BatchRelu& relu = {});
MaskedGradient masked_gradient(const at::Tensor& grad, const at::Tensor& input,
                               const at::Tensor& mean, const at::Tensor& result);
at::Tensor gradient_of_input(const at::Tensor& grad, const at::Tensor& input,
                             const at::Tensor& mean, const at::Tensor& a, const at::Tensor& b,
                             const at::Tensor& c, const at::Tensor& shift = {});
}  // namespace ref

}  // namespace semitone::kernels
