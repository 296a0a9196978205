#include "semitone/amp/master_weights.h"

#include "semitone/amp/autocast.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/optim/fused_optimizer.h"
#include "src/amp/gradients.h"
#include "src/amp/same_memory.h"
#include "src/amp/state_mode.h"
#include "src/core/archive.h"
#include "src/core/log.h"
#include "src/kernels/flat.h"
#include "src/kernels/multi_tensor_norm.h"
#include "src/optim/capturable_step.h"

#include <torch/serialize.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <unordered_set>
#include <utility>

// A gradient passes through these states between backward and step():
//
// - In the model: parameter.grad, as backward left it.
// - Moved (take_gradients): master.grad has the unscaled fp32 gradient, and the model has none.
// - Deferred (defer_gradients): Pair::deferred has the model's 16-bit gradient, still scaled, and
//   master.grad is Pair::placeholder, a NaN. step() reads it from there in one pass, or
//   move_deferred_gradients() moves it after all. If the placeholder has been dropped, replaced or
//   filled in the meantime (is_deferred), that change wins.
// - Shown, in addition to moved or deferred (show_gradients): parameter.grad is the tensor that
//   step() will read (Pair::shown). Every function that needs the states above calls
//   hide_gradients() first.
//
// Weights have states too. A pair agrees while both versions and addresses are those recorded by
// agreed(). pull() copies changed elements of a parameter to its master; sync() also rounds a
// changed master into its parameter. maybe_stepped_ stands for changes of masters that no version
// counter shows.

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
  std::stringstream stream;
  saved.save_to(stream);
  torch::serialize::InputArchive low;
  low.load_from(stream);

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
  std::stringstream wide_stream;
  wide.save_to(wide_stream);
  torch::serialize::InputArchive loaded;
  loaded.load_from(wide_stream);
  state.serialize(loaded);
}

}  // namespace

MasterWeights::MasterWeights(torch::optim::Optimizer& optimizer, const ExactValues& exact)
    : optimizer_(&optimizer), fused_(dynamic_cast<optim::FusedOptimizer*>(&optimizer)) {
  if (evaluates_loss(optimizer)) {
    throw Error("amp.master_weights",
                "an optimizer that does not evaluate the loss inside its step", "LBFGS",
                "the model does not have the new weights there: use another optimizer");
  }
  adopt(exact);
}

void MasterWeights::agreed(Pair& pair) {
  pair.parameter_version = static_cast<std::uint32_t>(pair.parameter._version());
  pair.parameter_data = pair.parameter.const_data_ptr();
  pair.master_version = static_cast<std::uint32_t>(pair.master._version());
  pair.master_data = pair.master.const_data_ptr();
  pair.replaced = {};
}

MasterWeights::MasterWeights(MasterWeights&& other) noexcept
    : optimizer_(std::exchange(other.optimizer_, nullptr)),
      fused_(other.fused_),
      pairs_(std::move(other.pairs_)),
      by_parameter_(std::move(other.by_parameter_)),
      by_master_(std::move(other.by_master_)),
      maybe_stepped_(other.maybe_stepped_),
      deferred_inverse_(other.deferred_inverse_),
      shown_(other.shown_) {}

MasterWeights::~MasterWeights() {
  if (optimizer_ == nullptr) return;
  try {
    give_back();
  } catch (const std::exception& error) {
    log()->error(error.what());
  }
}

// An optimizer that kept the masters would go on training tensors that no model reads.
void MasterWeights::give_back() {
  // If the optimizer has been destroyed already, nothing else holds a master.
  const bool in_use = std::any_of(pairs_.begin(), pairs_.end(),
                                  [](const Pair& pair) { return pair.master.use_count() > 1; });
  if (!in_use) return;
  const StateMode mode;
  move_deferred_gradients();
  auto& state = optimizer_->state();
  for_each_parameter(*optimizer_, [&](std::size_t, std::size_t, at::Tensor& parameter) {
    const auto found = by_master_.find(parameter.unsafeGetTensorImpl());
    if (found == by_master_.end()) return;
    const Pair& pair = pairs_[found->second];
    if (const auto entry = state.find(parameter.unsafeGetTensorImpl()); entry != state.end()) {
      auto moved = std::move(entry->second);
      state.erase(entry);
      state[pair.parameter.unsafeGetTensorImpl()] = std::move(moved);
    }
    if (pair.master.grad().defined() && !pair.parameter.grad().defined())
      pair.parameter.mutable_grad() = pair.master.grad().to(pair.parameter.scalar_type());
    parameter = pair.parameter;
  });
}

// variable_data(), not detach(): a master needs its own version counter.
at::Tensor MasterWeights::make_master(const at::Tensor& parameter, const ExactValues& exact,
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

// Everything that can fail does so before anything is changed.
void MasterWeights::adopt(const ExactValues& exact) {
  const StateMode mode;
  std::vector<Pair> fresh;
  std::vector<std::pair<at::Tensor*, std::size_t>> places;  // in the groups, and whose
  std::vector<std::pair<at::Tensor, at::Tensor>> split;     // parameters and their exact values
  std::unordered_map<const c10::TensorImpl*, std::size_t> by_parameter;
  for_each_parameter(*optimizer_, [&](std::size_t group, std::size_t, at::Tensor& parameter) {
    if (!is_16bit(parameter.scalar_type()) || !parameter.requires_grad()) return;
    const auto value = exact.find(parameter.unsafeGetTensorImpl());
    if (fused_ != nullptr && parameter.scalar_type() == at::kBFloat16 &&
        fused_->splits_masters(optimizer_->param_groups()[group])) {
      if (value != exact.end()) split.emplace_back(parameter, value->second);
      return;
    }
    // A tied weight appears in the optimizer twice.
    const auto earlier = by_parameter_.find(parameter.unsafeGetTensorImpl());
    const auto [place, added] = by_parameter.try_emplace(
        parameter.unsafeGetTensorImpl(),
        earlier != by_parameter_.end() ? earlier->second : pairs_.size() + fresh.size());
    places.emplace_back(&parameter, place->second);
    if (!added || earlier != by_parameter_.end()) return;
    at::Tensor master = make_master(parameter, exact, fresh);
    master.requires_grad_(true);
    agreed(fresh.emplace_back(Pair{parameter, master, 0, nullptr, 0, nullptr}));
    // The state of a parameter that was just cast is in fp32, as the parameter was.
    const auto& state = optimizer_->state();
    const auto entry = state.find(parameter.unsafeGetTensorImpl());
    if (entry != state.end() && value == exact.end()) widen(*entry->second);
  });
  for (const auto& [parameter, value] : split) fused_->set_master(parameter, value);
  if (places.empty()) return;
  pairs_.reserve(pairs_.size() + fresh.size());
  by_parameter_.reserve(pairs_.size() + fresh.size());
  by_master_.reserve(pairs_.size() + fresh.size());
  for (Pair& pair : fresh) {
    auto& state = optimizer_->state();
    if (const auto entry = state.find(pair.parameter.unsafeGetTensorImpl()); entry != state.end()) {
      auto moved = std::move(entry->second);
      state.erase(entry);
      state[pair.master.unsafeGetTensorImpl()] = std::move(moved);
    }
    by_parameter_.emplace(pair.parameter.unsafeGetTensorImpl(), pairs_.size());
    by_master_.emplace(pair.master.unsafeGetTensorImpl(), pairs_.size());
    pairs_.push_back(std::move(pair));
  }
  for (const auto& [place, index] : places) *place = pairs_[index].master;
}

void MasterWeights::show_gradients() {
  hide_gradients();
  for (Pair& pair : pairs_) {
    at::Tensor& in_model = pair.parameter.mutable_grad();
    const at::Tensor& grad = is_deferred(pair) ? pair.deferred : pair.master.grad();
    if (in_model.defined() || !grad.defined()) continue;
    in_model = pair.shown = grad;
    shown_ = true;
  }
}

void MasterWeights::hide_gradients() {
  if (!std::exchange(shown_, false)) return;
  for (Pair& pair : pairs_) {
    const at::Tensor shown = std::exchange(pair.shown, {});
    if (!shown.defined()) continue;
    at::Tensor& in_model = pair.parameter.mutable_grad();
    if (in_model.is_same(shown)) {
      in_model.reset();
      continue;
    }
    // The model's current gradient counts, if there is one, unless the master's was replaced too.
    if (pair.deferred.defined() ? !is_deferred(pair) : !pair.master.grad().is_same(shown)) continue;
    pair.master.mutable_grad().reset();
    pair.deferred.reset();
    pair.placeholder.reset();
  }
}

void MasterWeights::take_gradients(Gradients& pass) {
  const StateMode mode;
  hide_gradients();
  const bool any = std::any_of(pairs_.begin(), pairs_.end(),
                               [](const Pair& pair) { return pair.parameter.grad().defined(); });
  if (!any) return;
  move_deferred_gradients();
  maybe_stepped_ = true;
  for (const Pair& pair : pairs_) pass.move(pair.parameter, pair.master);
}

bool MasterWeights::take_gradients(float inverse_scale) {
  const StateMode mode;
  Gradients pass(inverse_scale);
  take_gradients(pass);
  for_each_parameter(*optimizer_, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
    pass.unscale(parameter);  // the pass has the masters already
  });
  std::vector<at::Tensor> found_inf;
  pass.run(found_inf);
  return any_found_inf(found_inf);
}

// A gradient that is part of a larger tensor, such as a bucket that is reduced over ranks, cannot
// be kept: the next backward pass writes there.
bool MasterWeights::can_defer_gradients() const {
  const auto is_own = [](const at::Tensor& grad) {
    return grad.layout() == at::kStrided && grad.is_cpu() && !grad.is_view() &&
           grad.storage().nbytes() == grad.nbytes() && grad.storage().use_count() == 1;
  };
  return fused_ != nullptr && std::all_of(pairs_.begin(), pairs_.end(), [&](const Pair& pair) {
           const at::Tensor& grad = pair.parameter.grad();
           return !pair.master.grad().defined() &&
                  (!grad.defined() ||
                   (is_own(grad) && kernels::same_flat_layout(grad, pair.master)));
         });
}

bool MasterWeights::defer_gradients(float inverse_scale, bool& found_inf) {
  hide_gradients();
  if (!can_defer_gradients()) return false;
  const StateMode mode;
  maybe_stepped_ = true;
  deferred_inverse_ = inverse_scale;
  std::vector<at::Tensor> grads;
  for (Pair& pair : pairs_) {
    pair.deferred = pair.parameter.grad();
    if (!pair.deferred.defined()) continue;
    grads.push_back(pair.deferred);
    pair.parameter.mutable_grad().reset();
    if (pair.master.numel() <= 1) {
      pair.master.mutable_grad() =
          std::exchange(pair.deferred, {}).to(at::kFloat).mul_(inverse_scale);
      continue;
    }
    pair.placeholder = at::full({}, std::numeric_limits<float>::quiet_NaN(), pair.master.options())
                           .expand(pair.master.sizes())
                           .variable_data();
    pair.master.mutable_grad() = pair.placeholder;
  }
  for (const double largest :
       kernels::multi_tensor_norms(grads, std::numeric_limits<double>::infinity())) {
    // The result of the multiplication, as for gradients that are moved.
    found_inf = found_inf || !std::isfinite(static_cast<float>(largest) * inverse_scale);
  }
  return true;
}

// Whether the master's placeholder has not been dropped, replaced or filled since.
bool MasterWeights::is_deferred(const Pair& pair) {
  return pair.deferred.defined() && pair.master.grad().is_same(pair.placeholder) &&
         std::isnan(*pair.placeholder.const_data_ptr<float>());
}

MasterWeights::Deferred MasterWeights::deferred_gradients() {
  hide_gradients();
  Deferred deferred{{}, {}, deferred_inverse_};
  for (Pair& pair : pairs_) {
    if (is_deferred(pair)) {
      deferred.masters.push_back(pair.master);
      deferred.grads.push_back(pair.deferred);
    } else {
      take_deferred(pair);  // another gradient has replaced it
    }
  }
  return deferred;
}

void MasterWeights::scale_deferred_gradients(double factor) {
  deferred_inverse_ = static_cast<float>(double{deferred_inverse_} * factor);
}

// Returns a deferred gradient to the model. False if there is none, or if it was dropped or
// replaced in the optimizer.
bool MasterWeights::take_deferred(Pair& pair) {
  if (!pair.deferred.defined()) return false;
  const bool still = is_deferred(pair);
  const at::Tensor grad = std::exchange(pair.deferred, {});
  const at::Tensor placeholder = std::exchange(pair.placeholder, {});
  if (!still) {
    if (pair.master.grad().is_same(placeholder))  // zeroed, or filled
      pair.master.mutable_grad() = placeholder.contiguous();
    return false;
  }
  pair.master.mutable_grad().reset();
  pair.parameter.mutable_grad() = grad;
  return true;
}

void MasterWeights::move_deferred_gradients() {
  const StateMode mode;
  hide_gradients();
  std::vector<std::pair<const Pair*, at::Tensor>> later;  // what the model has got since
  Gradients pass(deferred_inverse_);
  for (Pair& pair : pairs_) {
    const at::Tensor since = pair.parameter.grad();
    if (!take_deferred(pair)) continue;
    if (since.defined()) later.emplace_back(&pair, since);
    pass.move(pair.parameter, pair.master);
  }
  std::vector<at::Tensor> ignored;  // defer_gradients() has reported it
  pass.run(ignored);
  for (const auto& [pair, grad] : later) pair->parameter.mutable_grad() = grad;
}

void MasterWeights::step() {
  const StateMode mode;
  hide_gradients();
  if (fused_ == nullptr) {
    optimizer_->step();
    write_model();
    return;
  }
  // Gradients in the model that coexist with deferred ones have another scale.
  const bool any_in_model = std::any_of(pairs_.begin(), pairs_.end(), [](const Pair& pair) {
    return pair.parameter.grad().defined();
  });
  if (any_in_model) take_gradients();
  optim::ModelCopies copies;
  std::vector<Pair*> stepped;
  for (Pair& pair : pairs_) {
    copies.emplace(pair.master.unsafeGetTensorImpl(), pair.parameter);
    if (take_deferred(pair) || pair.master.grad().defined()) stepped.push_back(&pair);
  }
  try {
    fused_->step(optim::FusedStep().copies(&copies).copies_inv_scale(deferred_inverse_));
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

void MasterWeights::step(optim::CapturableStep& step, const at::Tensor& found_inf) {
  hide_gradients();
  optim::ModelCopies copies;
  for (const Pair& pair : pairs_) copies.emplace(pair.master.unsafeGetTensorImpl(), pair.parameter);
  step.run(&copies, found_inf);
  for (Pair& pair : pairs_) agreed(pair);
  maybe_stepped_ = false;
}

void MasterWeights::note_step() {
  for (Pair& pair : pairs_) {
    pair.parameter.unsafeGetTensorImpl()->bump_version();
    pair.master.unsafeGetTensorImpl()->bump_version();
    agreed(pair);
  }
}

void MasterWeights::write_model() {
  const StateMode mode;
  for (Pair& pair : pairs_) {
    pair.parameter.copy_(pair.master);
    agreed(pair);
  }
  maybe_stepped_ = false;
}

bool MasterWeights::parameter_changed(const Pair& pair) {
  return pair.parameter_version != static_cast<std::uint32_t>(pair.parameter._version()) ||
         pair.parameter_data != pair.parameter.const_data_ptr();
}

bool MasterWeights::master_changed(const Pair& pair) {
  return pair.master_version != static_cast<std::uint32_t>(pair.master._version()) ||
         pair.master_data != pair.master.const_data_ptr();
}

namespace {

// Where a 16-bit tensor is not what exact values round to. Compared by their bits, which are those
// of a NaN too.
at::Tensor differ(const at::Tensor& value, const at::Tensor& exact) {
  return value.view(at::kShort).ne(exact.to(value.scalar_type()).view(at::kShort));
}

}  // namespace

// An element equal to its rounded master was not changed, so the master's exact value stays.
void MasterWeights::take_parameter(Pair& pair) {
  const at::Tensor value = pair.parameter.detach();
  if (value.sizes() != pair.master.sizes()) {
    throw Error("amp.master_weights",
                c10::str("a parameter of shape ", pair.master.sizes(), ", as at construction"),
                c10::str(value.sizes()), "was a file of another model loaded into it?");
  }
  const bool comparable = is_16bit(value.scalar_type()) && value.device() == pair.master.device() &&
                          !master_changed(pair);
  if (!comparable) {
    pair.master.copy_(value);
    agreed(pair);
    return;
  }
  const at::Tensor differs = differ(value, pair.master);
  const at::Tensor taken = with_replaced(pair, value, at::where(differs, value, pair.master));
  keep_replaced(pair, differs);
  pair.master.copy_(taken);
  Replaced replaced = std::move(pair.replaced);
  agreed(pair);
  pair.replaced = std::move(replaced);
}

// The elements that a parameter has got back are those that were replaced.
at::Tensor MasterWeights::with_replaced(const Pair& pair, const at::Tensor& value,
                                        const at::Tensor& otherwise) {
  const auto& [places, values] = pair.replaced;
  if (!values.defined()) return otherwise;
  if (!places.defined()) return at::where(differ(value, values), otherwise, values);
  const at::Tensor result = otherwise.reshape(-1);
  const at::Tensor now = value.reshape(-1).index_select(0, places);
  return result
      .index_copy(0, places, at::where(differ(now, values), result.index_select(0, places), values))
      .view(otherwise.sizes());
}

// Remembers the elements of the master that are about to be replaced: all of them where they are
// many. The first replaced are the exact ones.
void MasterWeights::keep_replaced(Pair& pair, const at::Tensor& differs) {
  auto& [places, values] = pair.replaced;
  if (values.defined() && !places.defined()) return;  // all are remembered
  const at::Tensor fresh = differs.reshape(-1).nonzero().squeeze(1);
  if (fresh.numel() == 0) return;
  const at::Tensor master = pair.master.reshape(-1);
  if (!values.defined() && 4 * fresh.numel() <= master.numel()) {
    places = fresh;
    values = master.index_select(0, fresh);
    return;
  }
  const at::Tensor all = values.defined() ? master.index_copy(0, places, values) : master.clone();
  places.reset();
  values = all.view(pair.master.sizes());
}

void MasterWeights::pull() {
  const StateMode mode;
  adopt({});
  for (Pair& pair : pairs_) {
    if (parameter_changed(pair)) take_parameter(pair);
  }
}

void MasterWeights::sync() {
  const StateMode mode;
  pull();
  for (Pair& pair : pairs_) {
    if (master_changed(pair)) {
      pair.parameter.copy_(pair.master);
      agreed(pair);
    } else if (maybe_stepped_) {
      // Usually it did not step, and a graph that saved the parameter must stay valid: no new
      // version.
      pair.parameter.variable_data().copy_(pair.master);
    }
  }
  if (maybe_stepped_) clear_cast_cache();
}

void MasterWeights::clear_gradients() {
  hide_gradients();
  for (Pair& pair : pairs_) {
    pair.master.mutable_grad().reset();
    pair.deferred.reset();
    pair.placeholder.reset();
  }
  maybe_stepped_ = false;
}

bool MasterWeights::has(const at::Tensor& parameter) const {
  return by_parameter_.count(parameter.unsafeGetTensorImpl()) > 0 ||
         (fused_ != nullptr && parameter.requires_grad() && fused_->has_split_master(parameter));
}

bool MasterWeights::has_gradient(const at::Tensor& parameter) const {
  const auto found = by_parameter_.find(parameter.unsafeGetTensorImpl());
  return found != by_parameter_.end() && pairs_[found->second].master.grad().defined();
}

at::Tensor MasterWeights::master_of(const at::Tensor& parameter) const {
  const auto found = by_parameter_.find(parameter.unsafeGetTensorImpl());
  if (found != by_parameter_.end()) return pairs_[found->second].master;
  const StateMode mode;
  const bool is_split = fused_ != nullptr && fused_->has_split_master(parameter);
  return is_split ? fused_->master_of(parameter).to(at::kFloat) : at::Tensor();
}

void MasterWeights::set(const at::Tensor& parameter, const at::Tensor& value) {
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

// Calls visit(key, pair) for every master, in the order of its first place in the optimizer. This
// differs from the order of pairs_, in which a parameter that was frozen comes later.
template <typename Visit>
void MasterWeights::for_each_place(Visit&& visit) const {
  std::unordered_set<const c10::TensorImpl*> seen;
  for_each_parameter(
      *optimizer_, [&](std::size_t group, std::size_t index, const at::Tensor& parameter) {
        const auto found = by_master_.find(parameter.unsafeGetTensorImpl());
        if (found == by_master_.end() || !seen.insert(found->first).second) return;
        visit("group" + std::to_string(group) + "_" + std::to_string(index), pairs_[found->second]);
      });
}

void MasterWeights::save(torch::serialize::OutputArchive& archive) const {
  archive.write("size", c10::IValue(static_cast<std::int64_t>(pairs_.size())));
  for_each_place(
      [&](const std::string& key, const Pair& pair) { archive.write(key, pair.master.detach()); });
}

std::vector<at::Tensor> MasterWeights::read(torch::serialize::InputArchive& archive) {
  constexpr auto kComponent = "amp.master_weights.load";
  adopt({});
  const auto size = read_value<std::int64_t>(archive, "size", kComponent);
  if (size != static_cast<std::int64_t>(pairs_.size())) {
    throw FileError(kComponent, std::to_string(pairs_.size()) + " master weights",
                    std::to_string(size),
                    "was it saved from the same model and optimizer, at the same opt level, with "
                    "the same layers frozen?");
  }
  std::vector<at::Tensor> values;
  for_each_place([&](const std::string& key, const Pair& pair) {
    values.push_back(read_value<at::Tensor>(archive, key, kComponent));
    if (values.back().sizes() != pair.master.sizes()) {
      throw FileError(kComponent, c10::str("a master weight of shape ", pair.master.sizes()),
                      c10::str(values.back().sizes(), " at ", key),
                      "was it saved from the same model?");
    }
  });
  return values;
}

void MasterWeights::assign(const std::vector<at::Tensor>& values) {
  auto value = values.begin();
  for_each_place([&](const std::string&, const Pair& pair) { set(pair.parameter, *value++); });
}

void MasterWeights::load(torch::serialize::InputArchive& archive) {
  assign(read(archive));
}

}  // namespace semitone::amp
