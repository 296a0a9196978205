#include "semitone/core/events.h"
#include "src/core/state_mode.h"
#include "src/kernels/flat.h"
#include "src/kernels/multi_tensor_norm.h"
#include "src/kernels/on_cuda.h"
#include "src/scaling/gradients.h"
#include "src/scaling/masters.h"
#include "src/scaling/step_watch.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

// A gradient passes through these states between backward and step():
//
// - In the model: parameter.grad, as backward left it.
// - Moved (take_gradients): master.grad has the unscaled fp32 gradient, and the model has none.
// - Deferred (defer_gradients): Pair::deferred has the model's 16-bit gradient, still scaled, and
//   master.grad is its placeholder. step() reads it from there in one pass, or
//   move_deferred_gradients() moves it after all.
// - Shown, in addition to moved or deferred (show_gradients): parameter.grad is the tensor that
//   step() will read (Pair::shown). Every function that needs the states above calls
//   hide_gradients() first.

namespace semitone::amp {
namespace {

// Sets the flags of the devices on which a gradient * inverse_scale, in fp32, is not finite.
void check_finite(const std::vector<at::Tensor>& grads, float inverse_scale,
                  std::vector<at::Tensor>& found_inf) {
  constexpr double kMaximum = std::numeric_limits<double>::infinity();
  std::map<std::string, std::vector<at::Tensor>> by_device;
  for (const at::Tensor& grad : grads) by_device[grad.device().str()].push_back(grad);
  for (const auto& [name, there] : by_device) {
    at::Tensor& flag = found_inf_on(found_inf, there.front().device());
    if (!flag.is_cpu()) {
      const at::Tensor largest =
          kernels::multi_tensor_norms_on_device(there, kMaximum).amax().to(at::kFloat);
      flag.masked_fill_(largest.mul(inverse_scale).isfinite().logical_not(), 1);
      continue;
    }
    for (const double largest : kernels::multi_tensor_norms(there, kMaximum))
      if (!std::isfinite(static_cast<float>(largest) * inverse_scale)) flag.fill_(1);
  }
}

}  // namespace

void Masters::show_gradients() {
  hide_gradients();
  for (Pair& pair : pairs_) {
    at::Tensor& in_model = pair.parameter.mutable_grad();
    const at::Tensor& grad =
        pair.deferred.counts(pair.master) ? pair.deferred.grad() : pair.master.grad();
    if (in_model.defined() || !grad.defined()) continue;
    in_model = pair.shown = grad;
    pair.shown_version = version_of(grad);
    pair.shown_probes = clipped_ ? probe(grad) : Probes{};
    shown_ = true;
  }
}

void Masters::hide_gradients() {
  if (!std::exchange(shown_, false)) return;
  for (Pair& pair : pairs_) {
    const at::Tensor shown = std::exchange(pair.shown, {});
    if (!shown.defined()) continue;
    at::Tensor& in_model = pair.parameter.mutable_grad();
    if (in_model.is_same(shown)) {
      pair.changed_clipped |= clipped_ && shown_changed(pair);
      in_model.reset();
      continue;
    }
    // The model's current gradient counts, if there is one, unless the master's was replaced too.
    if (pair.deferred.defined() ? !pair.deferred.counts(pair.master)
                                : !pair.master.grad().is_same(shown))
      continue;
    pair.master.mutable_grad().reset();
    pair.deferred.drop();
  }
}

void Masters::refresh_gradients() {
  if (has_changed_clipped()) return hide_gradients();  // step() is going to refuse them
  move_deferred_gradients();
  show_gradients();
}

bool Masters::has_gradients_in_model() const {
  return std::ranges::any_of(pairs_, [](const Pair& pair) {
    const at::Tensor& in_model = pair.parameter.grad();
    return pair.in_groups && in_model.defined() &&
           !(pair.shown.defined() && in_model.is_same(pair.shown));
  });
}

bool Masters::has_changed_clipped() const {
  return clipped_ && std::ranges::any_of(pairs_, [](const Pair& pair) {
           if (!pair.deferred.counts(pair.master)) return false;
           if (pair.changed_clipped) return true;
           const at::Tensor& in_model = pair.parameter.grad();
           return pair.shown.defined() && in_model.defined() &&
                  (!in_model.is_same(pair.shown) || shown_changed(pair));
         });
}

// LibTorch's functions that clip gradients write to their data().
bool Masters::shown_changed(const Pair& pair) {
  const at::Tensor& shown = pair.parameter.grad();
  return version_of(shown) != pair.shown_version || probe(shown) != pair.shown_probes;
}

void Masters::take_gradients(Gradients& pass) {
  const StateMode mode;
  follow_groups();
  hide_gradients();
  const bool any = std::any_of(pairs_.begin(), pairs_.end(), [](const Pair& pair) {
    return pair.in_groups && pair.parameter.grad().defined();
  });
  if (any) {
    move_deferred_gradients();
    maybe_stepped_ = true;
  }
  // Without new gradients too: the pass must not take the masters' for new ones.
  for (const Pair& pair : pairs_)
    if (pair.in_groups) pass.move(pair.parameter, pair.master);
}

bool Masters::take_gradients(float inverse_scale) {
  const events::PhaseScope phase(events::Phase::unscale);
  const StateMode mode;
  Gradients pass(inverse_scale);
  take_gradients(pass);
  std::vector<at::Tensor> earlier;  // to which the pass adds: they may have overflowed before
  for (const Pair& pair : pairs_) {
    const at::Tensor& grad = pair.master.grad();
    if (grad.defined()) earlier.push_back(grad.is_sparse() ? grad._values() : grad);
  }
  for_each_parameter(*optimizer_, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
    pass.unscale(parameter);  // the pass has the masters already
  });
  std::vector<at::Tensor> found_inf;
  check_finite(earlier, 1.0F, found_inf);
  pass.run(found_inf);
  return any_found_inf(found_inf);
}

// A gradient that is part of a larger tensor, such as a bucket that is reduced over ranks, cannot
// be kept: the next backward pass writes there.
bool Masters::can_defer_gradients() const {
  const auto is_own = [](const at::Tensor& grad) {
    return grad.layout() == at::kStrided && kernels::has_kernels(grad) && !grad.is_view() &&
           !grad.requires_grad() && grad.storage().nbytes() == grad.nbytes() &&
           grad.storage().use_count() == 1;
  };
  return fused_ != nullptr && std::all_of(pairs_.begin(), pairs_.end(), [&](const Pair& pair) {
           const at::Tensor& grad = pair.parameter.grad();
           if (!pair.in_groups) return true;
           return !pair.master.grad().defined() &&
                  (!grad.defined() || (is_own(grad) && kernels::same_device(grad, pair.master) &&
                                       kernels::same_flat_layout(grad, pair.master)));
         });
}

bool Masters::defer_gradients(float inverse_scale, std::vector<at::Tensor>& found_inf) {
  follow_groups();
  hide_gradients();
  if (!can_defer_gradients()) return false;
  const StateMode mode;
  maybe_stepped_ = true;
  deferred_inverse_ = inverse_scale;
  clipped_ = false;
  std::vector<at::Tensor> grads;
  for (Pair& pair : pairs_) {
    pair.deferred.drop();  // of an earlier backward, if its placeholder was dropped
    pair.changed_clipped = false;
    if (!pair.in_groups) continue;
    const at::Tensor grad = std::exchange(pair.parameter.mutable_grad(), {});
    if (!grad.defined()) continue;
    grads.push_back(grad);
    pair.deferred.defer(pair.master, grad);
  }
  check_finite(grads, inverse_scale, found_inf);  // as the gradients that are moved
  return true;
}

Masters::Deferred Masters::deferred_gradients() {
  follow_groups();
  hide_gradients();
  Deferred deferred{{}, {}, deferred_inverse_};
  for (Pair& pair : pairs_) {
    if (pair.deferred.counts(pair.master)) {
      deferred.masters.push_back(pair.master);
      deferred.grads.push_back(pair.deferred.grad());
    } else {
      take_deferred(pair);  // another gradient has replaced it
    }
  }
  return deferred;
}

void Masters::scale_deferred_gradients(double factor) {
  deferred_inverse_ = static_cast<float>(double{deferred_inverse_} * factor);
  clipped_ = true;
}

bool Masters::take_deferred(Pair& pair) {
  const at::Tensor grad = pair.deferred.take(pair.master);
  if (!grad.defined()) return false;
  pair.parameter.mutable_grad() = grad;
  return true;
}

void Masters::move_deferred_gradients() {
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

void Masters::clear_gradients() {
  hide_gradients();
  for (Pair& pair : pairs_) {
    pair.master.mutable_grad().reset();
    pair.deferred.drop();
  }
}

bool Masters::has_gradient(const at::Tensor& parameter) const {
  const auto found = by_parameter_.find(parameter.unsafeGetTensorImpl());
  return found != by_parameter_.end() && pairs_[found->second].master.grad().defined();
}

}  // namespace semitone::amp
