#include "src/optim/libtorch_step.h"

#include "src/kernels/multi_tensor_update.h"
#include "src/optim/rules.h"

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <typeinfo>
#include <unordered_set>
#include <vector>

namespace semitone::optim {
namespace {

using torch::optim::AdamOptions;
using torch::optim::AdamParamState;
using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;
using torch::optim::SGDOptions;
using torch::optim::SGDParamState;

// A parameter with a gradient.
struct Stepped {
  at::Tensor parameter;
  const torch::optim::OptimizerOptions* options;
};

bool is_suitable(const at::Tensor& parameter) {
  const at::Tensor& grad = parameter.grad();
  const auto dtype = parameter.scalar_type();
  return (dtype == at::kFloat || dtype == at::kDouble) && parameter.layout() == at::kStrided &&
         grad.layout() == at::kStrided && grad.scalar_type() == dtype &&
         grad.sizes() == parameter.sizes() && grad.device() == parameter.device();
}

// Nothing if one of them is not suitable.
std::optional<std::vector<Stepped>> stepped_by(torch::optim::Optimizer& optimizer) {
  std::vector<Stepped> result;
  std::unordered_set<const void*> memory;
  for (auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.defined() || !parameter.grad().defined()) continue;
      if (!is_suitable(parameter) ||
          !memory.insert(parameter.storage().unsafeGetStorageImpl()).second)
        return std::nullopt;
      result.push_back({parameter, &group.options()});
    }
  }
  return result;
}

// The state of a parameter, made if it is missing.
template <typename State>
State& state_of(torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  auto& entry = optimizer.state()[parameter.unsafeGetTensorImpl()];
  if (entry == nullptr) entry = std::make_unique<State>();
  return static_cast<State&>(*entry);
}

at::Tensor defined_or_zeros(const at::Tensor& tensor, const at::Tensor& parameter) {
  return tensor.defined() ? tensor
                          : torch::zeros_like(parameter, at::MemoryFormat::Preserve).detach();
}

template <typename Options, typename State>
void step_adam(torch::optim::Optimizer& optimizer, const std::vector<Stepped>& all,
               bool decouples_decay) {
  std::vector<kernels::Update> updates;
  std::vector<kernels::AdamRule> rules;
  for (const auto& [parameter, its_options] : all) {
    const auto& options = static_cast<const Options&>(*its_options);
    auto& state = state_of<State>(optimizer, parameter);
    state.step(state.step() + 1);
    state.exp_avg(defined_or_zeros(state.exp_avg(), parameter));
    state.exp_avg_sq(defined_or_zeros(state.exp_avg_sq(), parameter));
    if (options.amsgrad())
      state.max_exp_avg_sq(defined_or_zeros(state.max_exp_avg_sq(), parameter));
    const auto own = FusedAdamOptions(options.lr())
                         .betas(options.betas())
                         .eps(options.eps())
                         .weight_decay(options.weight_decay())
                         .adam_w_mode(decouples_decay)
                         .amsgrad(options.amsgrad());
    rules.push_back(adam_rule(own, state.step(), /*grad_scale=*/1));
    updates.push_back({parameter,
                       {},
                       parameter.grad(),
                       {},
                       {state.exp_avg(), state.exp_avg_sq(),
                        options.amsgrad() ? state.max_exp_avg_sq() : at::Tensor()}});
  }
  kernels::multi_tensor_update(updates, rules);
}

void step_sgd(torch::optim::Optimizer& optimizer, const std::vector<Stepped>& all) {
  std::vector<kernels::Update> updates;
  std::vector<kernels::SgdRule> rules;
  for (const auto& [parameter, its_options] : all) {
    const auto& options = static_cast<const SGDOptions&>(*its_options);
    at::Tensor momentum;
    bool first = false;
    if (options.momentum() != 0) {
      auto& state = state_of<SGDParamState>(optimizer, parameter);
      first = !state.momentum_buffer().defined();
      state.momentum_buffer(defined_or_zeros(state.momentum_buffer(), parameter));
      momentum = state.momentum_buffer();
    }
    const auto own = FusedSGDOptions(options.lr())
                         .momentum(options.momentum())
                         .dampening(options.dampening())
                         .weight_decay(options.weight_decay())
                         .nesterov(options.nesterov());
    rules.push_back(sgd_rule(own, first, /*grad_scale=*/1));
    updates.push_back({parameter, {}, parameter.grad(), {}, {momentum, {}, {}}});
  }
  kernels::multi_tensor_update(updates, rules);
}

}  // namespace

bool step_in_one_pass(torch::optim::Optimizer& optimizer) {
  // A derived class may step in another way.
  const std::type_info& type = typeid(optimizer);
  const bool is_sgd = type == typeid(torch::optim::SGD);
  const bool is_adam = type == typeid(torch::optim::Adam);
  if (!is_sgd && !is_adam && type != typeid(torch::optim::AdamW)) return false;
  const auto all = stepped_by(optimizer);
  if (!all.has_value()) return false;
  const at::NoGradGuard no_grad;
  if (is_sgd) {
    step_sgd(optimizer, *all);
  } else if (is_adam) {
    step_adam<AdamOptions, AdamParamState>(optimizer, *all, /*decouples_decay=*/false);
  } else {
    step_adam<AdamWOptions, AdamWParamState>(optimizer, *all, /*decouples_decay=*/true);
  }
  return true;
}

}  // namespace semitone::optim
