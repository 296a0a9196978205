#include "src/core/libtorch_states.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/core/archive.h"

#include <ATen/ops/full_like.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace semitone {
namespace {

void widen_tensor(at::Tensor& tensor) {
  if (tensor.defined() && is_16bit(tensor.scalar_type())) tensor = tensor.to(at::kFloat);
}

// The tensors of a state that have one element for each of the parameter. Not LBFGS's, which has one
// state for all parameters.
std::vector<at::Tensor*> elementwise(torch::optim::OptimizerParamState& state) {
  if (auto* const sgd = dynamic_cast<torch::optim::SGDParamState*>(&state))
    return {&sgd->momentum_buffer()};
  if (auto* const adam = dynamic_cast<torch::optim::AdamParamState*>(&state))
    return {&adam->exp_avg(), &adam->exp_avg_sq(), &adam->max_exp_avg_sq()};
  if (auto* const adamw = dynamic_cast<torch::optim::AdamWParamState*>(&state))
    return {&adamw->exp_avg(), &adamw->exp_avg_sq(), &adamw->max_exp_avg_sq()};
  if (auto* const rmsprop = dynamic_cast<torch::optim::RMSpropParamState*>(&state))
    return {&rmsprop->square_avg(), &rmsprop->momentum_buffer(), &rmsprop->grad_avg()};
  if (auto* const adagrad = dynamic_cast<torch::optim::AdagradParamState*>(&state))
    return {&adagrad->sum()};
  return {};
}

}  // namespace

void widen_state(torch::optim::OptimizerParamState& state) {
  for (at::Tensor* const tensor : elementwise(state)) widen_tensor(*tensor);
  if (auto* const lbfgs = dynamic_cast<torch::optim::LBFGSParamState*>(&state)) {
    for (at::Tensor* const tensor : {&lbfgs->d(), &lbfgs->H_diag(), &lbfgs->prev_flat_grad()})
      widen_tensor(*tensor);
    for (auto* const history : {&lbfgs->old_dirs(), &lbfgs->old_stps(), &lbfgs->ro()}) {
      for (at::Tensor& tensor : *history) widen_tensor(tensor);
    }
  }
}

void assign_options(torch::optim::OptimizerParamGroup& group,
                    const torch::optim::OptimizerOptions& options) {
  try {
    torch::serialize::OutputArchive saved;
    options.serialize(saved);
    torch::serialize::InputArchive loaded = reread(saved);
    group.options().serialize(loaded);
  } catch (const c10::Error&) {  // a class of the program without serialize()
    group.set_options(options.clone());
  }
}

void require_states_fit(torch::optim::Optimizer& optimizer, const std::string& component,
                        const std::string& whose) {
  constexpr auto kRemedy =
      "construct the optimizer with the saved run's parameters, in the same order";
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      if (found->second == nullptr) {
        throw FileError(component,
                        fmt::format("a state of its own for each parameter of {}", whose),
                        "one of two parameters, which were one tensor in the saved run", kRemedy);
      }
      for (const at::Tensor* const tensor : elementwise(*found->second)) {
        if (!tensor->defined() || tensor->sizes() == parameter.sizes()) continue;
        throw FileError(component,
                        fmt::format("the state of a parameter of shape [{}] in {}",
                                    fmt::join(parameter.sizes(), ", "), whose),
                        fmt::format("one of shape [{}]", fmt::join(tensor->sizes(), ", ")),
                        kRemedy);
      }
    }
  }
}

void add_initial_states(torch::optim::Optimizer& optimizer) {
  if (dynamic_cast<const torch::optim::Adagrad*>(&optimizer) == nullptr) return;
  for (const auto& group : optimizer.param_groups()) {
    const auto& options = static_cast<const torch::optim::AdagradOptions&>(group.options());
    for (const at::Tensor& parameter : group.params()) {
      auto& state = optimizer.state()[parameter.unsafeGetTensorImpl()];
      if (state != nullptr) continue;
      auto made = std::make_unique<torch::optim::AdagradParamState>();
      made->step(0);
      made->sum(at::full_like(parameter.detach(), options.initial_accumulator_value()));
      state = std::move(made);
    }
  }
}

}  // namespace semitone
