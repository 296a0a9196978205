#pragma once

#include "semitone/amp/mixed_precision.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace semitone::train {

// A model that maps the inputs of a batch to logits, with a row for each label: those of N images,
// (N, channels, height, width) in [0, 1], to (N, classes).
class Classifier {
 public:
  // @param smallest_batch  see smallest_batch()
  template <typename Module>
  Classifier(torch::nn::ModuleHolder<Module> model,  // NOLINT(google-explicit-constructor)
             std::int64_t smallest_batch = 1)
      : module_(model.ptr()),
        smallest_batch_(smallest_batch),
        forward_([model](amp::MixedPrecision& mixed, const at::Tensor& inputs) mutable {
          return mixed.forward(model, inputs);
        }) {}

  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  // The number of examples that each batch must have in training: 2 if a BatchNorm layer sees one
  // value per channel and example, since one value has no variance. Otherwise 1.
  std::int64_t smallest_batch() const { return smallest_batch_; }
  at::Tensor forward(amp::MixedPrecision& mixed, const at::Tensor& inputs) const {
    return forward_(mixed, inputs);
  }

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::int64_t smallest_batch_;
  std::function<at::Tensor(amp::MixedPrecision&, const at::Tensor&)> forward_;
};

// Creates a model with new weights, drawn from LibTorch's default generator.
using ModelFactory = std::function<Classifier()>;

}  // namespace semitone::train
