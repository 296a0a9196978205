#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

namespace semitone::report {

// Names of parameters and buffers by their memory: that of a parameter is also that of its views.
class ParameterNames {
 public:
  struct Entry {
    std::string name;   // "layer2.conv.weight"
    std::string layer;  // "layer2.conv"
    bool is_parameter;  // not a buffer
    at::Tensor tensor;
  };

  void add(const torch::nn::Module& model, const std::string& prefix);

  // Notices tensors that have new memory since, for example after a cast of the model.
  void refresh();

  // In the order of the models. They stay where they are.
  const std::deque<Entry>& entries() const { return entries_; }

  // The entry of a tensor, of a view of it, or of a replica's copy of it; null if it has none.
  const Entry* find(const at::Tensor& tensor) const;

 private:
  void add(const std::string& prefix, const std::string& name, const at::Tensor& tensor,
           bool is_parameter);

  std::deque<Entry> entries_;  // which stay where they are when others are added
  // Several parameters may be parts of one storage.
  std::unordered_map<const void*, std::vector<std::size_t>> by_storage_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> by_tensor_;
};

}  // namespace semitone::report
