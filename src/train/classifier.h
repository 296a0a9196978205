#pragma once

#include "semitone/amp/mixed_precision.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>

namespace semitone::train {

// A model that maps the inputs of a batch to logits, with a row for each label: those of N images,
// (N, channels, height, width) in [0, 1], to (N, classes).
class Classifier {
 public:
  template <typename Module>
  Classifier(torch::nn::ModuleHolder<Module> model)  // NOLINT(google-explicit-constructor)
      : module_(model.ptr()),
        forward_([model](amp::MixedPrecision& mixed, const at::Tensor& inputs) mutable {
          return mixed.forward(model, inputs);
        }) {}

  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  at::Tensor forward(amp::MixedPrecision& mixed, const at::Tensor& inputs) const {
    return forward_(mixed, inputs);
  }

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::function<at::Tensor(amp::MixedPrecision&, const at::Tensor&)> forward_;
};

// Creates a model with new weights, drawn from LibTorch's default generator.
using ModelFactory = std::function<Classifier()>;

}  // namespace semitone::train
