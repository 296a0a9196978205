#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

// Layer norm and RMS norm with their gradients.
namespace semitone::nn {

// The parameters of a normalisation. Tensors that a layer does not have are undefined.
struct LayerNormParameters {
  std::string_view component;  // the name in messages: a literal
  at::IntArrayRef normalized_shape;
  bool centred;  // layer norm; else RMS norm, without a bias
  double eps;
  at::Tensor weight;
  at::Tensor bias = {};
};

// Error for shapes and dtypes that the public functions exclude.
at::Tensor layer_norm(const at::Tensor& input, const LayerNormParameters& layer);

}  // namespace semitone::nn
