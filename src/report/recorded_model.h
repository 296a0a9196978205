#pragma once

#include "src/report/parameter_names.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace semitone::report {

// The parameters of models, and the layers to which they belong.
class RecordedModel {
 public:
  using Entry = ParameterNames::Entry;

  explicit RecordedModel(const torch::nn::Module& model) { add(model, ""); }

  // Adds a model with a prefix, between steps. Error if that makes a name that another one has;
  // nothing is added then.
  void add(const torch::nn::Module& model, const std::string& prefix);

  // Call it before a step that is looked at: a cast gives parameters new memory.
  void refresh() { names_.refresh(); }

  // The parameter or buffer with the memory of a tensor; null if there is none.
  const Entry* find(const at::Tensor& tensor) const { return names_.find(tensor); }
  // Each parameter once, those of real floating-point numbers in memory of their own only.
  const std::vector<const Entry*>& parameters() const { return parameters_; }
  // Whether a layer has no layers inside.
  bool is_leaf(const std::string& layer) const;

  // Of the line "model".
  nlohmann::ordered_json describe(std::int64_t world_size) const;

 private:
  struct Layer {
    std::string type;  // "Conv2d"
    bool is_leaf;
  };
  void require_new_names(const torch::nn::Module& model, const std::string& prefix) const;
  void add_layers(const torch::nn::Module& module, const std::string& name);

  ParameterNames names_;
  std::vector<const Entry*> parameters_;
  std::map<std::string, Layer> layers_;
};

// Whether the values of a tensor can be sampled: can_examine(), and real.
bool can_sample(const at::Tensor& tensor);

}  // namespace semitone::report
