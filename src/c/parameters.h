#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

namespace semitone::c {

// A list of parameters, in the places where C++ has optimizers and modules.

// An optimizer that holds the parameters and changes nothing: the caller's own optimizer steps.
class ParameterList : public torch::optim::Optimizer {
 public:
  explicit ParameterList(std::vector<at::Tensor> parameters);
  at::Tensor step(LossClosure closure = nullptr) override;
};

// A module without a forward, which has the parameters by their names: "encoder.0.weight" is in the
// module "0" of its module "encoder".
std::shared_ptr<torch::nn::Module> module_of(const std::vector<std::string>& names,
                                             const std::vector<at::Tensor>& parameters);

}  // namespace semitone::c
