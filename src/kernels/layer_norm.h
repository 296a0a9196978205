#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

// Layer norm and RMS norm: rows normalised by their own mean and variance.
//
// An input is floating-point, of any layout and device, and consists of rows of `columns` elements,
// one after the other. It is computed in fp32 (fp64 for fp64) and rounded once. The kernels
// accumulate sums over a column, and each vector lane's sum over a row, in fp32 for at most 256
// terms at a time, and add these partial sums in fp64. Results do not depend on the number of
// threads.
namespace semitone::kernels {

struct LayerNorm {
  std::int64_t columns;
  bool centred;  // layer norm; without, the mean is taken to be 0 (RMS norm) and bias is undefined
  double eps;
  at::Tensor weight;  // undefined, or `columns` elements of any floating dtype
  at::Tensor bias;
};

// The output is contiguous, with the input's shape and dtype. Statistics are fp32 (rows), or fp64
// for an fp64 input; mean is undefined for RMS norm. Kernels leave both undefined unless they are
// requested.
struct LayerNormResult {
  at::Tensor output;
  at::Tensor mean;
  at::Tensor rstd;
};
LayerNormResult layer_norm(const at::Tensor& input, const LayerNorm& norm, bool with_statistics);

// Undefined if not requested. input: in the input's dtype; weight and bias: in their shapes and
// dtypes.
struct LayerNormGradients {
  at::Tensor input;
  at::Tensor weight;
  at::Tensor bias;
};
struct LayerNormWanted {
  bool input;
  bool weight;
  bool bias;
};
LayerNormGradients layer_norm_backward(const at::Tensor& grad, const at::Tensor& input,
                                       const at::Tensor& mean, const at::Tensor& rstd,
                                       const LayerNorm& norm, const LayerNormWanted& wanted);

namespace ref {
// The reference implementations, composed of ATen operators. The first can be differentiated.
LayerNormResult layer_norm(const at::Tensor& input, const LayerNorm& norm);
LayerNormGradients layer_norm_backward(const at::Tensor& grad, const at::Tensor& input,
                                       const at::Tensor& mean, const at::Tensor& rstd,
                                       const LayerNorm& norm, const LayerNormWanted& wanted);
}  // namespace ref

}  // namespace semitone::kernels
