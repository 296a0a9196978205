#include "semitone/optim/fused_optimizer.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "src/core/archive.h"
#include "src/core/state_mode.h"
#include "src/kernels/flat.h"
#include "src/kernels/rounding.h"
#include "src/optim/deferred_gradient.h"
#include "src/optim/fused_state.h"
#include "src/optim/work.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <unordered_set>
#include <utility>

namespace semitone::optim {
namespace {

bool is_supported(c10::ScalarType dtype) {
  return dtype == at::kDouble || kernels::format_of(dtype);
}

// Converts a tensor to its parameter's current dtype, device and layout, since the parameter may
// have been cast or moved. In memory with gaps, which kernels do not process, any order is fine.
void follow(at::Tensor& tensor, const at::Tensor& parameter, c10::ScalarType dtype) {
  if (tensor.scalar_type() == dtype && tensor.device() == parameter.device() &&
      !parameter.is_non_overlapping_and_dense())
    return;
  tensor = kernels::laid_out_like(tensor, parameter, dtype);
}

// The name of a parameter by its place, for messages.
std::string place(std::size_t group, std::size_t index) {
  return "parameter " + std::to_string(index) + " of group " + std::to_string(group);
}

void check_parameter(std::string_view component, const at::Tensor& parameter,
                     const std::string& name) {
  if (!is_supported(parameter.scalar_type()) || parameter.layout() != at::kStrided) {
    throw Error(
        component, "dense float32, float16, bfloat16 or float64 parameters",
        c10::str(name, ", ", dtype_name(parameter.scalar_type()), ", ", parameter.layout()));
  }
}

void check_gradient(std::string_view component, const at::Tensor& grad, const at::Tensor& parameter,
                    const std::string& name) {
  if (grad.layout() != at::kStrided) {
    throw Error(
        component, "dense gradients", c10::str(grad.layout(), " for ", name),
        "use a dense gradient (an embedding without sparse), or torch::optim::Adagrad, or SGD "
        "without weight decay, for this parameter");
  }
  if (DeferredGradient::is_placeholder(grad)) {
    throw Error(component, "a step through MixedPrecision::step, or MasterWeights::step",
                "another call, while the gradient of " + name + " is still in the model",
                "or call MixedPrecision::master_params first: it moves gradients");
  }
  if (!is_supported(grad.scalar_type()) || grad.sizes() != parameter.sizes() ||
      grad.device() != parameter.device()) {
    throw Error(
        component,
        c10::str("a floating gradient of shape ", parameter.sizes(), " on ", parameter.device(),
                 " for ", name),
        c10::str(dtype_name(grad.scalar_type()), ", ", grad.sizes(), " on ", grad.device()));
  }
}

void check_copy(std::string_view component, const at::Tensor& copy, const at::Tensor& parameter,
                const std::string& name) {
  if (copy.defined() && copy.is_floating_point() && copy.layout() == at::kStrided &&
      copy.sizes() == parameter.sizes() && copy.device() == parameter.device() &&
      !copy.is_alias_of(parameter))
    return;
  throw Error(component,
              c10::str("a model copy of shape ", parameter.sizes(), " on ", parameter.device(),
                       " with memory of its own for ", name),
              copy.defined() ? c10::str(dtype_name(copy.scalar_type()), ", ", copy.sizes(), " on ",
                                        copy.device())
                             : "an undefined tensor");
}

bool is_set(std::string_view component, const at::Tensor& found_inf) {
  if (!found_inf.defined()) return false;
  if (found_inf.numel() != 1)
    throw Error(component, "found_inf of one element", c10::str(found_inf.sizes()));
  return !(found_inf.item<double>() == 0);
}

// Seed of the random bits that round bf16 state: different for each parameter and step. It does not
// depend on memory, or on a rank's share of the parameters.
std::uint32_t seed_of(const at::Tensor& parameter, std::uint32_t place, std::int64_t step) {
  auto seed = kernels::hash_bits(static_cast<std::uint32_t>(step));
  seed = kernels::hash_bits(seed + place);
  for (const std::int64_t size : parameter.sizes())
    seed = kernels::hash_bits(seed + static_cast<std::uint32_t>(size));
  return seed;
}

}  // namespace

FusedOptimizer::FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                               std::unique_ptr<torch::optim::OptimizerOptions> defaults)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), std::move(defaults)) {
  for (const auto& group : groups) add_param_group(group);
}

void FusedOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  Optimizer::add_param_group(group);
  if (group.has_options()) param_groups_.back().set_options(group.options().clone());
}

at::Tensor FusedOptimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  step(FusedStep());
  return loss;
}

bool FusedOptimizer::step(const FusedStep& how) {
  const events::PhaseScope phase(events::Phase::optimizer);
  const StateMode mode;
  if (is_set(component(), how.found_inf())) return false;
  const double grad_scale = how.inv_scale() * how.clip();
  for (const double scale : {grad_scale, grad_scale * how.copies_inv_scale()}) {
    if (!(std::abs(scale) <= double{std::numeric_limits<float>::max()}))
      throw Error(component(), "an inv_scale * clip that float32 holds", c10::str(scale));
  }
  settle();
  std::vector<Work> work = gather(how);
  count(work);
  update(work);
  return true;
}

// Creates the state that the step needs, and counts the step.
void FusedOptimizer::count(std::span<Work> work) {
  for (Work& one : work) prepare(one, state_in(state_, one.update.param));
  for (Work& one : work) {
    one.step = ++one.state->step;
    one.update.seed = seed_of(one.update.param, one.place, one.step);
  }
}

void FusedOptimizer::set_parameter_places(semitone::detail::ParameterPlaces places) {
  places_ = std::move(places);
}

void FusedOptimizer::update(std::span<Work> work) {
  kernels::multi_tensor_update(items_of(work), rules_of(work).rules);
}

void FusedOptimizer::measure(std::span<const Work> /*work*/, StepOnDevice& /*step*/) const {}

void FusedOptimizer::check_options() const {
  check(defaults());
  for (const auto& group : param_groups()) check(group.options());
}

// All errors are detected here, before anything is changed.
std::vector<FusedOptimizer::Work> FusedOptimizer::gather(const FusedStep& how) {
  std::vector<Work> work;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    auto& group = param_groups_[g];
    check(group.options());
    const bool splits = splits_masters(group);
    for (std::size_t i = 0; i < group.params().size(); ++i) {
      const at::Tensor& parameter = group.params()[i];
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second || !parameter.defined()) continue;
      const auto own_place = static_cast<std::uint32_t>(seen.size() - 1);
      at::Tensor grad = parameter.grad();
      at::Tensor copy;
      double grad_scale = how.inv_scale() * how.clip();
      if (how.copies() != nullptr) {
        const auto entry = how.copies()->find(parameter.unsafeGetTensorImpl());
        if (entry != how.copies()->end()) {
          copy = entry->second;
          check_copy(component(), copy, parameter, place(g, i));
          if (grad.defined() && copy.grad().defined()) {
            throw Error(component(), "one gradient for " + place(g, i),
                        "one of the master and one of the model copy", "add the two first");
          }
          if (!grad.defined()) {
            grad = copy.grad();
            grad_scale *= how.copies_inv_scale();
          }
        }
      }
      if (!grad.defined()) continue;
      check_parameter(component(), parameter, place(g, i));
      check_gradient(component(), grad, parameter, place(g, i));
      if (splits && parameter.scalar_type() == at::kHalf) {
        throw Error(component(), "bfloat16 or float32 parameters with split_master",
                    "float16 for " + place(g, i), "use fp32 masters for it");
      }
      if (const FusedState* state = find(parameter); state != nullptr) {
        check_state(*state, parameter, slots(group.options()), place(g, i));
      }
      const auto given_place = places_.find(parameter.unsafeGetTensorImpl());
      const auto place = given_place == places_.end() ? own_place : given_place->second;
      Work one{
          &group.options(), nullptr, {parameter, {}, grad, copy, {}}, grad_scale, g, place, {}};
      follow(one.update.grad, parameter, grad.scalar_type());
      work.push_back(std::move(one));
    }
  }
  return work;
}

void FusedOptimizer::check_state(const FusedState& state, const at::Tensor& parameter,
                                 const std::vector<Slot>& slots, const std::string& name) const {
  const auto require_shape = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.sizes() == parameter.sizes()) return;
    throw Error(component(), c10::str("state of shape ", parameter.sizes(), " for ", name),
                c10::str(tensor.sizes()), "the parameter was resized");
  };
  for (std::size_t k = 0; k < slots.size(); ++k) {
    if (!slots[k].number) require_shape(state.tensors[k]);
  }
  require_shape(state.master_low);
}

void FusedOptimizer::prepare(Work& work, FusedState& state) const {
  const at::Tensor& parameter = work.update.param;
  work.state = &state;
  const auto dtype = state_dtype(*work.options, parameter);
  const std::vector<Slot> wanted = slots(*work.options);
  for (std::size_t k = 0; k < wanted.size(); ++k) {
    if (!wanted[k].wanted) continue;
    at::Tensor& tensor = state.tensors[k];
    work.fresh[k] = !tensor.defined();
    if (wanted[k].number) {
      const auto options = at::TensorOptions(parameter.device()).dtype(at::kDouble);
      tensor = tensor.defined() ? tensor.to(options) : at::full({}, wanted[k].initial, options);
      work.number = tensor;
      continue;
    }
    if (tensor.defined()) {
      follow(tensor, parameter, dtype);
    } else {
      tensor = at::full_like(parameter, wanted[k].initial, parameter.options().dtype(dtype));
    }
    work.update.state[k] = tensor;
  }
  if (parameter.scalar_type() == at::kBFloat16 && splits_masters(*work.options)) {
    if (state.master_low.defined()) {
      follow(state.master_low, parameter, at::kShort);
    } else {
      state.master_low = at::zeros_like(parameter, parameter.options().dtype(at::kShort));
    }
    work.update.low = state.master_low;
  } else {
    state.master_low.reset();  // the step below leaves it behind
  }
}

c10::ScalarType FusedOptimizer::state_dtype(const torch::optim::OptimizerOptions& options,
                                            const at::Tensor& parameter) const {
  if (parameter.scalar_type() == at::kDouble) return at::kDouble;
  return keeps_bf16_state(options) ? at::kBFloat16 : at::kFloat;
}

const FusedState* FusedOptimizer::find(const at::Tensor& parameter) const {
  settle();
  const auto entry = state_.find(parameter.unsafeGetTensorImpl());
  return entry == state_.end() ? nullptr : static_cast<const FusedState*>(entry->second.get());
}

std::int64_t FusedOptimizer::steps_of(const at::Tensor& parameter) const {
  const FusedState* state = find(parameter);
  return state == nullptr ? 0 : state->step;
}

at::Tensor FusedOptimizer::state_of(const at::Tensor& parameter, std::string_view name) const {
  std::string names;
  const std::vector<Slot> all = slots(defaults());
  for (std::size_t k = 0; k < all.size(); ++k) {
    if (all[k].name == name) {
      const FusedState* state = find(parameter);
      return state == nullptr ? at::Tensor() : state->tensors[k];
    }
    names.append(k == 0 ? "" : ", ").append(all[k].name);
  }
  throw Error(component(), "one of the state's names, " + names, name);
}

at::Tensor FusedOptimizer::master_of(const at::Tensor& parameter) const {
  const FusedState* state = find(parameter);
  if (state == nullptr || !state->master_low.defined() || parameter.scalar_type() != at::kBFloat16)
    return parameter;
  return kernels::join_split_master(parameter, state->master_low);
}

bool FusedOptimizer::has_split_master(const at::Tensor& parameter) const {
  if (parameter.scalar_type() != at::kBFloat16) return false;
  return std::any_of(param_groups_.begin(), param_groups_.end(),
                     [&](const torch::optim::OptimizerParamGroup& group) {
                       return splits_masters(group) &&
                              std::any_of(
                                  group.params().begin(), group.params().end(),
                                  [&](const at::Tensor& one) { return one.is_same(parameter); });
                     });
}

void FusedOptimizer::set_master(const at::Tensor& parameter, const at::Tensor& value) {
  if (!has_split_master(parameter)) {
    throw Error(component(), "a bfloat16 parameter of a group with split_master", "another tensor");
  }
  if (!value.defined() || value.sizes() != parameter.sizes() || !value.is_floating_point()) {
    throw Error(component(), c10::str("a floating value of shape ", parameter.sizes()),
                value.defined() ? c10::str(value.sizes(), " of ", dtype_name(value.scalar_type()))
                                : "an undefined tensor");
  }
  settle();
  const StateMode mode;
  at::Tensor& low = state_in(state_, parameter).master_low;
  if (!low.defined()) low = at::empty_like(parameter, parameter.options().dtype(at::kShort));
  kernels::split_master(value.to(parameter.options().dtype(at::kFloat)), parameter, low);
}

}  // namespace semitone::optim
