#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace semitone::train {

// The values of tensors, to compare and to keep.
inline std::string bits(const std::vector<at::Tensor>& tensors) {
  std::string text;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor dense = tensor.detach().contiguous();
    text.append(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes());
  }
  return text;
}

// Those of all parameters and buffers.
inline std::string bits(const torch::nn::Module& model) {
  return bits(model.parameters()) + bits(model.buffers());
}

}  // namespace semitone::train
