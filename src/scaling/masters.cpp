#include "src/scaling/masters.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "semitone/optim/fused_optimizer.h"
#include "src/core/archive.h"
#include "src/core/libtorch_states.h"
#include "src/core/log.h"
#include "src/core/state_mode.h"
#include "src/core/unreduced.h"
#include "src/optim/capturable_step.h"
#include "src/optim/deferred_step.h"
#include "src/optim/libtorch_step.h"
#include "src/scaling/gradients.h"
#include "src/scaling/same_memory.h"

#include <torch/serialize.h>
#include <torch/types.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

// The masters and their places in the optimizer. masters_gradients.cpp has the states of
// gradients, masters_sync.cpp those of weights, and masters_io.cpp saves and loads.

namespace semitone::amp {
namespace {

// Widens optimizer state to fp32 by serialising and reloading it, which all of LibTorch's
// optimizers support.
void widen(torch::optim::OptimizerParamState& state) {
  torch::serialize::OutputArchive saved;
  try {
    state.serialize(saved);
  } catch (const c10::Error&) {
    throw Error(
        "amp.master_weights", "an optimizer whose state can be saved", "one without serialize()",
        "construct the masters before the optimizer's first step, or give its state serialize()");
  }
  torch::serialize::InputArchive low = reread(saved);
  torch::serialize::OutputArchive wide;
  bool any = false;
  for (const std::string& key : low.keys()) {
    c10::IValue value;
    low.read(key, value);
    if (value.isTensor() && is_16bit(value.toTensor().scalar_type())) {
      any = true;
      value = value.toTensor().to(at::kFloat);
    }
    wide.write(key, value);
  }
  if (!any) return;
  torch::serialize::InputArchive loaded = reread(wide);
  state.serialize(loaded);
}

// Moves the state of an optimizer from one parameter to another.
void move_state(torch::optim::Optimizer& optimizer, const at::Tensor& from, const at::Tensor& to) {
  auto& state = optimizer.state();
  const auto entry = state.find(from.unsafeGetTensorImpl());
  if (entry == state.end()) return;
  auto moved = std::move(entry->second);
  state.erase(entry);
  state[to.unsafeGetTensorImpl()] = std::move(moved);
}

}  // namespace

Masters::Masters(torch::optim::Optimizer& optimizer, const ExactValues& exact)
    : optimizer_(&optimizer), fused_(dynamic_cast<optim::FusedOptimizer*>(&optimizer)) {
  if (evaluates_loss(optimizer)) {
    throw Error("amp.master_weights",
                "an optimizer that does not evaluate the loss inside its step", "LBFGS",
                "the model does not have the new weights there: use another optimizer");
  }
  adopt(exact);
}

Masters::Masters(Masters&& other) noexcept
    : optimizer_(std::exchange(other.optimizer_, nullptr)),
      fused_(other.fused_),
      pairs_(std::move(other.pairs_)),
      by_parameter_(std::move(other.by_parameter_)),
      by_master_(std::move(other.by_master_)),
      maybe_stepped_(other.maybe_stepped_),
      deferred_inverse_(other.deferred_inverse_),
      clipped_(other.clipped_),
      shown_(other.shown_) {}

Masters::~Masters() {
  if (optimizer_ == nullptr) return;
  try {
    give_back();
  } catch (const std::exception& error) {
    log()->error(error.what());
  }
}

// An optimizer that kept the masters would go on training tensors that no model reads.
void Masters::give_back() {
  // If the optimizer has been destroyed already, nothing else holds a master.
  const bool in_use = std::any_of(pairs_.begin(), pairs_.end(),
                                  [](const Pair& pair) { return pair.master.use_count() > 1; });
  if (!in_use) return;
  const StateMode mode;
  follow_groups();
  move_deferred_gradients();
  // The optimizer has their state by the address of the master.
  for (const Pair& pair : pairs_)
    if (!pair.in_groups) optimizer_->state().erase(pair.master.unsafeGetTensorImpl());
  for_each_parameter(*optimizer_, [&](std::size_t, std::size_t, at::Tensor& parameter) {
    const auto found = by_master_.find(parameter.unsafeGetTensorImpl());
    if (found == by_master_.end()) return;
    const Pair& pair = pairs_[found->second];
    move_state(*optimizer_, parameter, pair.parameter);
    if (pair.master.grad().defined() && !pair.parameter.grad().defined())
      pair.parameter.mutable_grad() = pair.master.grad().to(pair.parameter.scalar_type());
    parameter = pair.parameter;
  });
}

void Masters::follow_groups() {
  std::vector<bool> in_groups(pairs_.size());
  for_each_parameter(*optimizer_, [&](std::size_t, std::size_t, at::Tensor& place) {
    const auto index = index_at(place);
    if (!index.has_value()) return;
    place = pairs_[*index].master;
    in_groups[*index] = true;
  });
  bool changed = false;
  for (std::size_t i = 0; i < pairs_.size(); ++i)
    changed = changed || pairs_[i].in_groups != in_groups[i];
  if (!changed) return;
  const StateMode mode;
  move_deferred_gradients();
  for (std::size_t i = 0; i < pairs_.size(); ++i) {
    Pair& pair = pairs_[i];
    if (pair.in_groups && !in_groups[i]) set_aside(pair);
    if (!pair.in_groups && in_groups[i] && parameter_changed(pair)) take_parameter(pair);
    pair.in_groups = in_groups[i];
  }
}

// The pair of a place in the optimizer's groups. It has the parameter, not the master, if the program
// has filled its group anew.
std::optional<std::size_t> Masters::index_at(const at::Tensor& place) const {
  for (const auto* const indices : {&by_master_, &by_parameter_}) {
    const auto found = indices->find(place.unsafeGetTensorImpl());
    if (found != indices->end()) return found->second;
  }
  return std::nullopt;
}

// Gives a parameter what its master has. The optimizer's state stays the master's.
void Masters::set_aside(Pair& pair) {
  if (!parameter_changed(pair) && (master_changed(pair) || is_ahead(pair))) {
    pair.parameter.copy_(pair.master);
    agreed(pair);
  }
  if (pair.master.grad().defined() && !pair.parameter.grad().defined()) {
    pair.parameter.mutable_grad() = pair.master.grad().to(pair.parameter.scalar_type());
    mark_unreduced(pair.parameter.grad(), unreduced_mark(pair.master.grad()));
  }
  pair.master.mutable_grad().reset();
}

std::size_t Masters::size() const {
  return static_cast<std::size_t>(std::ranges::count_if(pairs_, &Pair::in_groups));
}

// variable_data(), not detach(): a master needs its own version counter.
at::Tensor Masters::make_master(const at::Tensor& parameter, const ExactValues& exact,
                                const std::vector<Pair>& fresh) const {
  if (const auto value = exact.find(parameter.unsafeGetTensorImpl()); value != exact.end()) {
    return value->second.variable_data();
  }
  for (const std::vector<Pair>* pairs : {&pairs_, &fresh}) {
    for (const Pair& pair : *pairs) {
      if (same_memory(pair.parameter, parameter)) return pair.master.variable_data();
    }
  }
  return parameter.detach().to(at::kFloat);
}

// What adopt() has found and made, before anything is changed.
struct Masters::Adoption {
  std::vector<Pair> fresh;
  std::vector<std::pair<at::Tensor*, std::size_t>> places;  // in the groups, and whose
  std::vector<std::pair<at::Tensor, at::Tensor>> split;     // parameters and their exact values
};

// Everything that can fail does so before anything is changed.
void Masters::adopt(const ExactValues& exact) {
  const StateMode mode;
  follow_groups();
  Adoption found = find_adoption(exact);
  for (const auto& [parameter, value] : found.split) fused_->set_master(parameter, value);
  if (found.places.empty()) return;
  pairs_.reserve(pairs_.size() + found.fresh.size());
  by_parameter_.reserve(pairs_.size() + found.fresh.size());
  by_master_.reserve(pairs_.size() + found.fresh.size());
  for (Pair& pair : found.fresh) {
    move_state(*optimizer_, pair.parameter, pair.master);
    by_parameter_.emplace(pair.parameter.unsafeGetTensorImpl(), pairs_.size());
    by_master_.emplace(pair.master.unsafeGetTensorImpl(), pairs_.size());
    pairs_.push_back(std::move(pair));
  }
  for (const auto& [place, index] : found.places) *place = pairs_[index].master;
}

Masters::Adoption Masters::find_adoption(const ExactValues& exact) {
  Adoption found;
  std::unordered_map<const c10::TensorImpl*, std::size_t> by_parameter;
  for_each_parameter(*optimizer_, [&](std::size_t group, std::size_t, at::Tensor& parameter) {
    if (!is_16bit(parameter.scalar_type()) || !parameter.requires_grad()) return;
    const auto value = exact.find(parameter.unsafeGetTensorImpl());
    if (fused_ != nullptr && parameter.scalar_type() == at::kBFloat16 &&
        fused_->splits_masters(optimizer_->param_groups()[group])) {
      if (value != exact.end()) found.split.emplace_back(parameter, value->second);
      return;
    }
    // A tied weight appears in the optimizer twice.
    const auto [place, added] = by_parameter.try_emplace(parameter.unsafeGetTensorImpl(),
                                                         pairs_.size() + found.fresh.size());
    found.places.emplace_back(&parameter, place->second);
    if (!added) return;
    at::Tensor master = make_master(parameter, exact, found.fresh);
    master.requires_grad_(true);
    agreed(found.fresh.emplace_back(Pair{.parameter = parameter, .master = master}));
    const auto& state = optimizer_->state();
    const auto entry = state.find(parameter.unsafeGetTensorImpl());
    if (entry == state.end()) return;
    // The state of a parameter that was just cast is in fp32, as the parameter was, unless it was
    // loaded from a training of 16-bit weights.
    value == exact.end() ? widen(*entry->second) : widen_state(*entry->second);
  });
  return found;
}

void Masters::step(bool in_one_pass) {
  const events::PhaseScope phase(events::Phase::optimizer);
  const StateMode mode;
  follow_groups();
  hide_gradients();
  if (fused_ == nullptr) {
    widen_states();
    // A graph may have saved the weights that have no gradient: they get no new version.
    std::vector<bool> has_gradient(pairs_.size());
    for (std::size_t i = 0; i < pairs_.size(); ++i)
      has_gradient[i] = pairs_[i].master.grad().defined();
    if (!in_one_pass || !optim::step_in_one_pass(*optimizer_)) optimizer_->step();
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      Pair& pair = pairs_[i];
      const bool stepped = has_gradient[i] || master_changed(pair) || is_ahead(pair);
      if (!stepped || !pair.in_groups) continue;
      pair.parameter.copy_(pair.master);
      agreed(pair);
    }
    maybe_stepped_ = false;
    return;
  }
  step_fused([this](const optim::FusedStep& how) { fused_->step(how); });
}

// A state that was loaded since may be that of 16-bit weights: small changes of it would be lost.
void Masters::widen_states() {
  auto& state = optimizer_->state();
  for_each_parameter(*optimizer_, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
    if (parameter.scalar_type() != at::kFloat) return;  // it has no master
    const auto entry = state.find(parameter.unsafeGetTensorImpl());
    if (entry != state.end()) widen_state(*entry->second);
  });
}

void Masters::step_unless(const at::Tensor& found_inf, std::shared_ptr<kernels::ReadLater> result) {
  const StateMode mode;
  follow_groups();
  hide_gradients();
  step_fused([&](const optim::FusedStep& how) {
    optim::DeferredStep::step(*fused_, how, found_inf, std::move(result));
  });
}

void Masters::step_fused(const std::function<void(const optim::FusedStep&)>& take) {
  // Gradients in the model that coexist with deferred ones have another scale.
  const bool any_in_model = std::any_of(pairs_.begin(), pairs_.end(), [](const Pair& pair) {
    return pair.in_groups && pair.parameter.grad().defined();
  });
  if (any_in_model) take_gradients();
  optim::ModelCopies copies;
  std::vector<Pair*> stepped;
  for (Pair& pair : pairs_) {
    copies.emplace(pair.master.unsafeGetTensorImpl(), pair.parameter);
    if (take_deferred(pair) || pair.master.grad().defined()) stepped.push_back(&pair);
  }
  try {
    take(optim::FusedStep().copies(&copies).copies_inv_scale(
        static_cast<double>(deferred_inverse_)));
  } catch (...) {  // as after any other optimizer's step that throws: the masters have them
    Gradients pass(deferred_inverse_);
    for (const Pair* pair : stepped) pass.move(pair->parameter, pair->master);
    std::vector<at::Tensor> ignored;
    pass.run(ignored);
    throw;
  }
  for (Pair* pair : stepped) {
    pair->parameter.mutable_grad().reset();
    agreed(*pair);
  }
  maybe_stepped_ = false;
}

void Masters::step(optim::CapturableStep& step, const at::Tensor& found_inf) {
  hide_gradients();
  optim::ModelCopies copies;
  for (const Pair& pair : pairs_) copies.emplace(pair.master.unsafeGetTensorImpl(), pair.parameter);
  step.run(&copies, found_inf);
  for (Pair& pair : pairs_)
    if (pair.in_groups) agreed(pair);
  maybe_stepped_ = false;
}

void Masters::note_step() {
  for (Pair& pair : pairs_) {
    if (!pair.in_groups) continue;
    pair.parameter.unsafeGetTensorImpl()->bump_version();
    pair.master.unsafeGetTensorImpl()->bump_version();
    agreed(pair);
  }
}

// Null if there is none that counts.
const Masters::Pair* Masters::find(const at::Tensor& parameter) const {
  const auto found = by_parameter_.find(parameter.unsafeGetTensorImpl());
  if (found == by_parameter_.end()) return nullptr;
  const Pair& pair = pairs_[found->second];
  return pair.in_groups || !parameter_changed(pair) ? &pair : nullptr;
}

bool Masters::trains(const at::Tensor& parameter) const {
  const Pair* const pair = find(parameter);
  return pair != nullptr ? pair->in_groups : has(parameter);
}

at::Tensor Masters::parameter_of(const at::Tensor& master) const {
  const auto found = by_master_.find(master.unsafeGetTensorImpl());
  return found == by_master_.end() ? at::Tensor() : pairs_[found->second].parameter;
}

bool Masters::has(const at::Tensor& parameter) const {
  if (find(parameter) != nullptr) return true;
  if (fused_ == nullptr || !fused_->has_split_master(parameter)) return false;
  // A frozen one keeps the split master that it had before.
  return parameter.requires_grad() || !fused_->master_of(parameter).is_same(parameter);
}

at::Tensor Masters::master_of(const at::Tensor& parameter) const {
  if (const Pair* const pair = find(parameter)) return pair->master;
  const StateMode mode;
  const bool is_split = fused_ != nullptr && fused_->has_split_master(parameter);
  return is_split ? fused_->master_of(parameter).to(at::kFloat) : at::Tensor();
}

void Masters::set(const at::Tensor& parameter, const at::Tensor& value) {
  const StateMode mode;
  const auto found = by_parameter_.find(parameter.unsafeGetTensorImpl());
  if (found == by_parameter_.end() && fused_ != nullptr && fused_->has_split_master(parameter)) {
    fused_->set_master(parameter, value);
    return;
  }
  if (found == by_parameter_.end()) {
    throw Error("amp.master_weights.set", "a parameter that has a master", "one that has none");
  }
  Pair& pair = pairs_[found->second];
  pair.master.copy_(value);
  pair.parameter.copy_(pair.master);
  agreed(pair);
}

}  // namespace semitone::amp
