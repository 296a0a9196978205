#include "src/optim/libtorch_step.h"

#include "src/kernels/flat.h"
#include "src/kernels/multi_tensor_update.h"
#include "src/kernels/on_cuda.h"
#include "src/optim/rules.h"

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <algorithm>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <typeinfo>
#include <utility>
#include <vector>

namespace semitone::optim {
namespace {

using torch::optim::AdamOptions;
using torch::optim::AdamParamState;
using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;
using torch::optim::SGDOptions;
using torch::optim::SGDParamState;

struct ParameterWithOptions {
  at::Tensor parameter;  // it has a gradient
  const torch::optim::OptimizerOptions* options;
};

// Whether a tensor has a parameter's dtype and memory order, so that a kernel reads both alike.
bool fits(const at::Tensor& tensor, const at::Tensor& parameter) {
  return tensor.layout() == at::kStrided && tensor.scalar_type() == parameter.scalar_type() &&
         tensor.device() == parameter.device() && kernels::same_flat_layout(tensor, parameter);
}

bool state_fits(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  const auto entry = optimizer.state().find(parameter.unsafeGetTensorImpl());
  if (entry == optimizer.state().end()) return true;
  const auto all_fit = [&](std::initializer_list<at::Tensor> tensors) {
    return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
      return !tensor.defined() || fits(tensor, parameter);
    });
  };
  const auto averages_fit = [&](const auto& state) {
    return all_fit({state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq()});
  };
  if (const auto* const adam = dynamic_cast<const AdamParamState*>(entry->second.get()))
    return averages_fit(*adam);
  if (const auto* const adamw = dynamic_cast<const AdamWParamState*>(entry->second.get()))
    return averages_fit(*adamw);
  const auto* const sgd = dynamic_cast<const SGDParamState*>(entry->second.get());
  return sgd != nullptr && all_fit({sgd->momentum_buffer()});
}

// Whether two of the parameters, which have no gaps, share memory.
bool overlap(const std::vector<ParameterWithOptions>& all) {
  std::map<const char*, const char*> ranges;
  for (const auto& [parameter, options] : all) {
    const auto* const begin = static_cast<const char*>(parameter.const_data_ptr());
    ranges.emplace(begin, begin + parameter.nbytes());
  }
  const char* last = nullptr;
  return ranges.size() < all.size() ||
         std::any_of(
             ranges.begin(), ranges.end(),
             [&](auto& range) { return range.first < std::exchange(last, range.second); });
}

// Returns nullopt if a kernel cannot process one of them.
std::optional<std::vector<ParameterWithOptions>> parameters_of(torch::optim::Optimizer& optimizer) {
  std::vector<ParameterWithOptions> result;
  for (auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.defined() || !parameter.grad().defined()) continue;
      if (parameter.scalar_type() != at::kFloat || !kernels::has_kernels(parameter) ||
          !fits(parameter, parameter) || !fits(parameter.grad(), parameter) ||
          !state_fits(optimizer, parameter))
        return std::nullopt;
      if (parameter.numel() > 0) result.push_back({parameter, &group.options()});
    }
  }
  if (overlap(result)) return std::nullopt;
  return result;
}

// The state of a parameter; created if missing.
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

// Without eps, a second moment below 2^-126, which kernels flush to 0, would divide by 0.
bool has_eps(const torch::optim::OptimizerOptions& options, bool is_adam) {
  return (is_adam ? static_cast<const AdamOptions&>(options).eps()
                  : static_cast<const AdamWOptions&>(options).eps()) > 0;
}

template <typename Options, typename State>
void step_adam(torch::optim::Optimizer& optimizer, const std::vector<ParameterWithOptions>& all,
               bool decouples_decay) {
  std::vector<kernels::Update> updates;
  std::vector<kernels::AdamRule> rules;
  for (const auto& [parameter, options_of_group] : all) {
    const auto& options = static_cast<const Options&>(*options_of_group);
    auto& state = state_of<State>(optimizer, parameter);
    state.step(state.step() + 1);
    state.exp_avg(defined_or_zeros(state.exp_avg(), parameter));
    state.exp_avg_sq(defined_or_zeros(state.exp_avg_sq(), parameter));
    if (options.amsgrad())
      state.max_exp_avg_sq(defined_or_zeros(state.max_exp_avg_sq(), parameter));
    const auto fused = FusedAdamOptions(options.lr())
                           .betas(options.betas())
                           .eps(options.eps())
                           .weight_decay(options.weight_decay())
                           .adam_w_mode(decouples_decay)
                           .amsgrad(options.amsgrad());
    rules.push_back(adam_rule(fused, state.step(), /*grad_scale=*/1));
    updates.push_back({parameter,
                       {},
                       parameter.grad(),
                       {},
                       {state.exp_avg(), state.exp_avg_sq(),
                        options.amsgrad() ? state.max_exp_avg_sq() : at::Tensor()}});
  }
  kernels::multi_tensor_update(updates, rules);
}

void step_sgd(torch::optim::Optimizer& optimizer, const std::vector<ParameterWithOptions>& all) {
  std::vector<kernels::Update> updates;
  std::vector<kernels::SgdRule> rules;
  for (const auto& [parameter, options_of_group] : all) {
    const auto& options = static_cast<const SGDOptions&>(*options_of_group);
    at::Tensor momentum;
    bool first = false;
    if (options.momentum() != 0) {
      auto& state = state_of<SGDParamState>(optimizer, parameter);
      first = !state.momentum_buffer().defined();
      state.momentum_buffer(defined_or_zeros(state.momentum_buffer(), parameter));
      momentum = state.momentum_buffer();
    }
    const auto fused = FusedSGDOptions(options.lr())
                           .momentum(options.momentum())
                           .dampening(options.dampening())
                           .weight_decay(options.weight_decay())
                           .nesterov(options.nesterov());
    rules.push_back(sgd_rule(fused, first, /*grad_scale=*/1));
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
  const auto all = parameters_of(optimizer);
  if (!all.has_value()) return false;
  if (!is_sgd &&
      !std::ranges::all_of(*all, [&](const auto& one) { return has_eps(*one.options, is_adam); }))
    return false;
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
