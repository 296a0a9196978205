#include "semitone/amp/autocast.h"
#include "semitone/amp/cast_tree.h"
#include "semitone/core/error.h"
#include "semitone/optim/clip_grad.h"
#include "src/amp/mixed_precision_impl.h"
#include "src/amp/rank.h"
#include "src/core/log.h"
#include "src/kernels/multi_tensor_norm.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <iterator>
#include <map>
#include <string>
#include <unordered_set>
#include <utility>

namespace semitone::amp {

// The way of one loss through backward: begin() before it, finish() or put_back() after it.
struct ScaledLoss::Work {
  using Impl = MixedPrecision::Impl;
  using PerOptimizer = Impl::PerOptimizer;

  Impl* mixed;
  std::int64_t loss_id;
  float inverse;
  at::Tensor inverse_on_device;  // if it is to be read there
  bool delay;
  std::vector<PerOptimizer*> optimizers;  // that were named for the loss
  std::vector<Impl::SetAside> others;     // gradients of the optimizers that were not
  bool begun = false;

  void begin();
  void finish();
  void put_back() noexcept;

 private:
  void check() const;
  void set_others_aside();
  void restore_others() noexcept;
  void forget_set_aside(const PerOptimizer& optimizer);
  bool may_defer(const PerOptimizer& known) const;
};

void ScaledLoss::Work::check() const {
  constexpr auto kWhere = "amp.mixed_precision.scale_loss";
  for (const PerOptimizer* known : optimizers) {
    if (!known->scaled.has_value()) continue;
    const auto& scaled = *known->scaled;
    if (scaled.open) {
      throw Error(kWhere, "one loss at a time in backward for an optimizer",
                  "a second one while the first is not finished",
                  "call finish() after a backward of your own through value()");
    }
    if (scaled.loss_id != loss_id) {
      throw Error(kWhere,
                  "loss_id " + std::to_string(scaled.loss_id) +
                      ", whose gradients the optimizer holds scaled",
                  std::to_string(loss_id),
                  "finish the delayed loss first: call it once with delay_unscale = false");
    }
    if (scaled.inverse != inverse) {
      throw Error(kWhere, "the loss scale that the delayed gradients have", "another one",
                  "a step with the same loss_id moved it: give such losses their own loss_ids");
    }
  }
}

// Gradients of this backward are scaled. Those in the model so far are not: they are kept apart
// until it is over.
void ScaledLoss::Work::begin() {
  if (begun) return;
  check();
  mixed->pull("scale_loss");
  begun = true;
  set_others_aside();
  for (PerOptimizer* known : optimizers) {
    if (known->masters.has_value()) known->masters->move_deferred_gradients();
    if (!known->scaled.has_value()) {  // else what is there is scaled alike
      known->for_each_leaf([this](const at::Tensor& parameter) {
        if (!parameter.grad().defined()) return;
        mixed->set_aside[parameter.unsafeGetTensorImpl()] = {parameter, parameter.grad()};
        parameter.mutable_grad().reset();
      });
    }
    known->scaled = Impl::Scaled{loss_id, inverse, /*open=*/true};
  }
}

void ScaledLoss::Work::set_others_aside() {
  if (optimizers.size() == mixed->optimizers.size()) return;
  std::unordered_set<const c10::TensorImpl*> named;
  for (const PerOptimizer* known : optimizers) {
    known->for_each_leaf(
        [&](const at::Tensor& parameter) { named.insert(parameter.unsafeGetTensorImpl()); });
  }
  for (const PerOptimizer& known : mixed->optimizers) {
    known.for_each_leaf([&](const at::Tensor& parameter) {
      if (!named.insert(parameter.unsafeGetTensorImpl()).second) return;
      others.push_back({parameter, parameter.grad()});
      parameter.mutable_grad().reset();
    });
  }
}

void ScaledLoss::Work::restore_others() noexcept {
  for (const Impl::SetAside& other : others) other.parameter.mutable_grad() = other.grad;
  others.clear();
}

void ScaledLoss::Work::forget_set_aside(const PerOptimizer& optimizer) {
  optimizer.for_each_leaf([this](const at::Tensor& parameter) {
    mixed->set_aside.erase(parameter.unsafeGetTensorImpl());
  });
}

// Whether the model's gradients can stay where they are until the step.
bool ScaledLoss::Work::may_defer(const PerOptimizer& known) const {
  if (!known.masters.has_value() || inverse_on_device.defined() ||
      !known.masters->can_defer_gradients())
    return false;
  bool any_earlier = false;
  known.for_each_leaf([&](const at::Tensor& parameter) {
    any_earlier = any_earlier || mixed->set_aside.count(parameter.unsafeGetTensorImpl()) > 0;
  });
  return !any_earlier;
}

void ScaledLoss::Work::finish() {
  begin();  // where backward was not run at all
  if (delay) {
    for (PerOptimizer* known : optimizers) known->scaled->open = false;
    restore_others();
    return;
  }
  const auto earlier = [this](const at::Tensor& parameter) {
    const auto found = mixed->set_aside.find(parameter.unsafeGetTensorImpl());
    return found == mixed->set_aside.end() ? at::Tensor() : found->second.grad;
  };
  const auto pending =
      std::find_if(mixed->pending.begin(), mixed->pending.end(), [this](const auto& candidate) {
        return candidate.loss_id == loss_id && candidate.optimizers == optimizers;
      });
  std::vector<at::Tensor> found_inf;
  if (pending != mixed->pending.end()) found_inf = pending->found_inf;

  std::vector<PerOptimizer*> deferring;
  std::copy_if(optimizers.begin(), optimizers.end(), std::back_inserter(deferring),
               [this](const PerOptimizer* known) { return may_defer(*known); });
  const auto defers = [&](const PerOptimizer* known) {
    return std::find(deferring.begin(), deferring.end(), known) != deferring.end();
  };
  Gradients scaled(inverse_on_device.defined() ? kernels::InverseScale(inverse_on_device)
                                               : kernels::InverseScale(inverse));
  for (PerOptimizer* known : optimizers) {
    if (known->masters.has_value() && !defers(known)) known->masters->take_gradients(scaled);
    for_each_parameter(*known->optimizer,
                       [&](std::size_t, std::size_t, const at::Tensor& parameter) {
                         if (!known->masters.has_value() || !known->masters->is_master(parameter))
                           scaled.unscale(parameter, earlier(parameter));
                       });
  }
  scaled.run(found_inf);

  // Gradients that were back-propagated without a scale, by hand, go to the masters too.
  Gradients by_hand(1.0F);
  for (PerOptimizer* known : optimizers) {
    if (!known->masters.has_value() || defers(known)) continue;
    known->masters->for_each([&](const at::Tensor& parameter, const at::Tensor&) {
      parameter.mutable_grad() = earlier(parameter);
    });
    known->masters->take_gradients(by_hand);
  }
  by_hand.run(found_inf);
  // Last: what threw before has left them in the model.
  for (PerOptimizer* known : deferring) {
    bool found = false;
    known->masters->defer_gradients(inverse, found);
    at::Tensor& flag = found_inf_on(found_inf, device_of(*known->optimizer));
    if (found) flag.fill_(1);
  }

  if (pending != mixed->pending.end()) {
    pending->found_inf = std::move(found_inf);
  } else {
    mixed->pending.push_back({loss_id, optimizers, std::move(found_inf)});
  }
  for (PerOptimizer* known : optimizers) {
    forget_set_aside(*known);
    known->scaled.reset();
  }
  restore_others();
}

void ScaledLoss::Work::put_back() noexcept {
  if (!begun) return;
  for (PerOptimizer* known : optimizers) {
    known->for_each_leaf([this](const at::Tensor& parameter) {
      const auto found = mixed->set_aside.find(parameter.unsafeGetTensorImpl());
      parameter.mutable_grad() =
          found == mixed->set_aside.end() ? at::Tensor() : found->second.grad;
    });
    forget_set_aside(*known);
    known->scaled.reset();
  }
  restore_others();
}

ScaledLoss::ScaledLoss(at::Tensor scaled, std::unique_ptr<Work> work)
    : scaled_(std::move(scaled)), work_(std::move(work)) {}

ScaledLoss::ScaledLoss(ScaledLoss&& other) noexcept
    : scaled_(std::move(other.scaled_)),
      work_(std::move(other.work_)),
      finished_(std::exchange(other.finished_, true)) {}

ScaledLoss::~ScaledLoss() {
  if (work_ != nullptr) work_->put_back();
}

void ScaledLoss::require_unfinished() const {
  if (finished_) {
    throw Error("amp.mixed_precision.scaled_loss", "one backward for each scale_loss",
                "another one after finish()", "call scale_loss again");
  }
}

const at::Tensor& ScaledLoss::value() {
  require_unfinished();
  if (work_ != nullptr) work_->begin();
  return scaled_;
}

void ScaledLoss::backward(const at::Tensor& gradient, bool retain_graph, bool create_graph) {
  value();
  try {
    scaled_.backward(gradient, retain_graph, create_graph);
  } catch (...) {
    cancel();
    throw;
  }
  finish();
}

void ScaledLoss::finish() {
  require_unfinished();
  try {
    if (work_ != nullptr) work_->finish();
  } catch (...) {
    cancel();
    throw;
  }
  finished_ = true;
  work_.reset();
}

void ScaledLoss::cancel() noexcept {
  if (work_ != nullptr) work_->put_back();
  work_.reset();
  finished_ = true;
}

ScaledLoss MixedPrecision::scale_loss(const at::Tensor& loss, torch::optim::Optimizer& optimizer,
                                      ScaleLossOptions options) {
  return scale_loss(loss, OptimizerRefs{optimizer}, options);
}

ScaledLoss MixedPrecision::scale_loss(const at::Tensor& loss, const OptimizerRefs& optimizers,
                                      ScaleLossOptions options) {
  constexpr auto kCaller = "scale_loss";
  const LossScaler& scaler = impl_->scaler(options.loss_id, kCaller);
  std::vector<Impl::PerOptimizer*> named;
  for (const torch::optim::Optimizer& optimizer : optimizers) {
    Impl::PerOptimizer* known = &impl_->of(optimizer, kCaller);
    if (std::find(named.begin(), named.end(), known) == named.end()) named.push_back(known);
  }
  if (named.empty()) {
    throw Error("amp.mixed_precision.scale_loss", "at least one optimizer", "none",
                "name those whose parameters the loss is to train");
  }
  if (!impl_->properties.enabled) return ScaledLoss(loss, nullptr);
  // Nothing to take out of the gradients, and nowhere to take them: plain training.
  const bool plain = !scaler.options().dynamic() && scaler.scale() == 1.0 &&
                     std::none_of(named.begin(), named.end(),
                                  [](const auto* known) { return known->masters.has_value(); });
  if (plain) return ScaledLoss(cast_floating(loss, at::kFloat), nullptr);
  const auto& on_device = impl_->scale_on_device;
  if (on_device.has_value() && on_device->loss_id != options.loss_id) {
    throw Error("amp.mixed_precision.scale_loss", "one loss_id in a captured step",
                std::to_string(options.loss_id) + " beside " + std::to_string(on_device->loss_id));
  }
  return ScaledLoss(
      on_device.has_value() ? LossScaler::scaled(loss, on_device->scale) : scaler.scaled(loss),
      std::make_unique<ScaledLoss::Work>(
          ScaledLoss::Work{impl_.get(),
                           options.loss_id,
                           scaler.inverse(),
                           on_device.has_value() ? on_device->inverse : at::Tensor(),
                           options.delay_unscale,
                           std::move(named),
                           {}}));
}

namespace {

// An optimizer skips its next step because a loss overflowed; a step that several losses want to be
// skipped is counted for the first of them.
void note_overflow(MixedPrecision::Impl& mixed, MixedPrecision::Impl::PerOptimizer& optimizer,
                   std::int64_t loss_id) {
  LossScaler& scaler = mixed.scaler(loss_id, "step");
  const bool first = !std::exchange(optimizer.skip, true);
  const bool say = first && mixed.properties.verbosity >= 1 && is_first_rank();
  Overflow overflow;
  if (say || scaler.wants_names()) {
    if (optimizer.masters.has_value()) {
      optimizer.masters->move_deferred_gradients();
      optimizer.masters->for_each([&](const at::Tensor& parameter, const at::Tensor& master) {
        mixed.names.add_alias(master, parameter);
      });
    }
    overflow = find_overflow(*optimizer.optimizer, mixed.names);
  }
  if (say) {
    const std::string where =
        overflow.parameters == 0
            ? "in gradients of another optimizer or rank"
            : fmt::format("inf or NaN in {} gradients, nearest the loss that of '{}'",
                          overflow.parameters, overflow.parameter);
    log()->info("skipped a step: loss {} overflowed at scale {}, {}", loss_id, scaler.scale(),
                where);
  }
  first ? scaler.note_skip(overflow) : scaler.note_overflow(overflow);
}

// Decides, with one host read, what became of the losses that an optimizer was named for, and takes
// them off the list. Returns found_inf by loss.
std::map<std::int64_t, bool> resolve(MixedPrecision::Impl& mixed,
                                     MixedPrecision::Impl::PerOptimizer& optimizer) {
  using Pending = MixedPrecision::Impl::Pending;
  const auto concerns = [&](const Pending& pending) {
    return std::find(pending.optimizers.begin(), pending.optimizers.end(), &optimizer) !=
           pending.optimizers.end();
  };
  std::vector<at::Tensor> flags;
  for (Pending& pending : mixed.pending) {
    if (!concerns(pending)) continue;
    // Where there were no gradients too, other ranks may have some.
    if (pending.found_inf.empty()) {
      found_inf_on(pending.found_inf, device_of(*optimizer.optimizer));
    }
    for (at::Tensor& flag : pending.found_inf) {
      if (mixed.found_inf_hook) mixed.found_inf_hook(flag);
      flags.push_back(flag);
    }
  }
  const std::vector<bool> set = read_flags(flags);

  auto flag = set.begin();
  std::map<std::int64_t, bool> found_by_loss;
  for (const Pending& pending : mixed.pending) {
    if (!concerns(pending)) continue;
    const auto end = flag + static_cast<std::ptrdiff_t>(pending.found_inf.size());
    const bool found = std::find(flag, end, true) != end;
    flag = end;
    found_by_loss[pending.loss_id] = found_by_loss[pending.loss_id] || found;
    if (!found) continue;
    for (auto* involved : pending.optimizers) {
      note_overflow(mixed, *involved, pending.loss_id);
    }
  }
  std::erase_if(mixed.pending, concerns);
  return found_by_loss;
}

}  // namespace

void MixedPrecision::Impl::require_unscaled(const PerOptimizer& known, const char* caller) {
  if (!known.scaled.has_value()) return;
  throw Error(std::string("amp.mixed_precision.") + caller, "gradients that are unscaled",
              known.scaled->open ? "a ScaledLoss that is not finished"
                                 : "scaled ones: the last scale_loss had delay_unscale = true",
              known.scaled->open ? "call its backward() or finish()"
                                 : "call the last backward of an iteration without it");
}

// Back-propagated without scale_loss.
void MixedPrecision::Impl::take_gradients_by_hand(PerOptimizer& known) {
  if (!known.masters.has_value()) return;
  Gradients by_hand(1.0F);
  known.masters->take_gradients(by_hand);
  std::vector<at::Tensor> ignored;
  by_hand.run(ignored);
}

double MixedPrecision::clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                                       double norm_type, bool error_if_nonfinite) {
  Impl::PerOptimizer& known = impl_->of(optimizer, "clip_grad_norm_");
  Impl::require_unscaled(known, "clip_grad_norm_");
  impl_->pull("clip_grad_norm_");
  Impl::take_gradients_by_hand(known);
  const auto deferred =
      known.masters.has_value() ? known.masters->deferred_gradients() : MasterWeights::Deferred{};
  std::unordered_set<const c10::TensorImpl*> masters;
  for (const at::Tensor& master : deferred.masters) masters.insert(master.unsafeGetTensorImpl());
  std::vector<at::Tensor> others;
  for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
    if (masters.count(parameter.unsafeGetTensorImpl()) == 0) others.push_back(parameter);
  });
  std::vector<double> norms{optim::grad_norm(others, norm_type)};
  for (const double norm : kernels::multi_tensor_norms(deferred.grads, norm_type))
    norms.push_back(norm * double{deferred.inverse_scale});
  const double norm = kernels::total_norm(norms, norm_type);
  const double factor = optim::clip_factor(norm, max_norm);
  if (!std::isfinite(norm)) {
    if (!error_if_nonfinite) return norm;
    throw Error("amp.mixed_precision.clip_grad_norm_", "finite gradients",
                "a norm of " + std::to_string(norm),
                "skip the step, or clip with error_if_nonfinite false");
  }
  if (factor == 1) return norm;
  optim::scale_grads_(others, factor);
  if (known.masters.has_value()) known.masters->scale_deferred_gradients(factor);
  return norm;
}

Step MixedPrecision::step(torch::optim::Optimizer& optimizer) {
  Impl::PerOptimizer& known = impl_->of(optimizer, "step");
  if (!impl_->properties.enabled) {
    optimizer.step();
    clear_cast_cache();
    return Step::stepped;
  }
  Impl::require_unscaled(known, "step");
  impl_->pull("step");
  Impl::take_gradients_by_hand(known);
  impl_->warn_of_idle_models(known);
  return impl_->end_step(
      known, [&] { known.masters.has_value() ? known.masters->step() : void(optimizer.step()); });
}

Step MixedPrecision::Impl::end_step(PerOptimizer& known, const std::function<void()>& take) {
  const auto found_by_loss = resolve(*this, known);
  const bool skip = std::exchange(known.skip, false);
  if (!skip) {
    take();
    clear_cast_cache();
  }
  if (known.masters.has_value()) known.masters->clear_gradients();
  std::exception_ptr diverged;
  for (const auto& [loss_id, found] : found_by_loss) {
    try {
      scaler(loss_id, "step").update(found);
    } catch (const DivergedError&) {
      if (diverged == nullptr) diverged = std::current_exception();
    }
  }
  if (diverged != nullptr) std::rethrow_exception(diverged);
  return skip ? Step::skipped : Step::stepped;
}

void MixedPrecision::zero_grad(torch::optim::Optimizer& optimizer) {
  Impl::PerOptimizer& known = impl_->of(optimizer, "zero_grad");
  optimizer.zero_grad();
  known.for_each_leaf([this](const at::Tensor& parameter) {
    parameter.mutable_grad().reset();
    impl_->set_aside.erase(parameter.unsafeGetTensorImpl());
  });
  // What was found in them is gone with them.
  if (known.scaled.has_value() && !known.scaled->open) known.scaled.reset();
  known.skip = false;
  for (Impl::Pending& pending : impl_->pending) std::erase(pending.optimizers, &known);
  std::erase_if(impl_->pending, [](const auto& pending) { return pending.optimizers.empty(); });
}

}  // namespace semitone::amp
