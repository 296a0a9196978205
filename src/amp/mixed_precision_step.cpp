#include "semitone/autocast/autocast.h"
#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "semitone/optim/clip_grad.h"
#include "src/amp/mixed_precision_impl.h"
#include "src/amp/rank.h"
#include "src/core/log.h"
#include "src/core/state_mode.h"
#include "src/kernels/multi_tensor_norm.h"
#include "src/optim/deferred_step.h"
#include "src/optim/libtorch_step.h"
#include "src/scaling/gradient_events.h"

#include <c10/util/ScopeExit.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

// What a training loop calls between backward and the next forward.

namespace semitone::amp {
namespace {

// An optimizer skips its next step because a loss overflowed. If several losses overflow, the skip
// is counted for the first of them.
void note_overflow(MixedPrecision::Impl& mixed, MixedPrecision::Impl::OptimizerRecord& optimizer,
                   std::int64_t loss_id) {
  LossScaler& scaler = mixed.scaler(loss_id, "step");
  const bool first = !std::exchange(optimizer.skip, true);
  optimizer.overflowed = loss_id;
  const bool logs = first && mixed.properties.verbosity >= 1 && is_first_rank();
  detail::Overflow overflow;
  if (logs || scaler.wants_names()) {
    if (optimizer.masters.has_value()) {
      const bool shown = optimizer.masters->shows_gradients();
      optimizer.masters->move_deferred_gradients();
      if (shown) optimizer.masters->show_gradients();
      optimizer.masters->for_each([&](const at::Tensor& parameter, const at::Tensor& master) {
        mixed.names.add_alias(master, parameter);
      });
    }
    overflow = find_overflow(*optimizer.optimizer, mixed.names);
  }
  if (logs) {
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

// Whether a result belongs to an optimizer's next step.
bool concerns(const MixedPrecision::Impl::Pending& pending,
              const MixedPrecision::Impl::OptimizerRecord& optimizer) {
  return std::find(pending.optimizers.begin(), pending.optimizers.end(), &optimizer) !=
         pending.optimizers.end();
}

// Determines, with one host read, the results of the losses that an optimizer was named for, and
// removes them from the list. Returns found_inf by loss.
std::map<std::int64_t, bool> resolve(MixedPrecision::Impl& mixed,
                                     MixedPrecision::Impl::OptimizerRecord& optimizer) {
  using Pending = MixedPrecision::Impl::Pending;
  const events::PhaseScope phase(events::Phase::unscale);
  std::vector<at::Tensor> flags;
  for (Pending& pending : mixed.pending) {
    if (!concerns(pending, optimizer)) continue;
    // Without gradients here, other ranks may still have some.
    if (pending.found_inf.empty()) {
      found_inf_on(pending.found_inf, device_of(*optimizer.optimizer));
    }
    for (at::Tensor& flag : pending.found_inf) {
      if (mixed.found_inf_hook) {
        const events::PhaseScope waiting(events::Phase::communication);
        mixed.found_inf_hook(flag);
      }
      flags.push_back(flag);
    }
  }
  const std::vector<bool> set = read_flags(flags);

  auto flag = set.begin();
  std::map<std::int64_t, bool> found_by_loss;
  for (const Pending& pending : mixed.pending) {
    if (!concerns(pending, optimizer)) continue;
    const auto end = flag + static_cast<std::ptrdiff_t>(pending.found_inf.size());
    const bool found = std::find(flag, end, true) != end;
    flag = end;
    if (pending.named) found_by_loss[pending.loss_id] = found_by_loss[pending.loss_id] || found;
    if (!found) continue;
    for (auto* involved : pending.optimizers) {
      note_overflow(mixed, *involved, pending.loss_id);
    }
  }
  std::erase_if(mixed.pending,
                [&](const Pending& pending) { return concerns(pending, optimizer); });
  return found_by_loss;
}

// The norm of deferred gradients and of those of other parameters together. One read per device,
// and another one for sparse or complex gradients.
double norm_of(const Masters::Deferred& deferred, const std::vector<at::Tensor>& others,
               double norm_type) {
  if (deferred.grads.empty()) return optim::grad_norm(others, norm_type);
  std::vector<at::Tensor> grads = deferred.grads;
  std::vector<at::Tensor> rest;
  for (const at::Tensor& parameter : others) {
    if (!parameter.defined() || !parameter.grad().defined()) continue;
    const at::Tensor& grad = parameter.grad();
    if (grad.layout() == at::kStrided && grad.is_floating_point()) {
      grads.push_back(grad.detach());
    } else {
      rest.push_back(parameter);
    }
  }
  const double of_rest = optim::grad_norm(rest, norm_type);
  std::vector<double> norms = kernels::multi_tensor_norms(grads, norm_type);
  for (std::size_t i = 0; i < deferred.grads.size(); ++i)
    norms[i] *= double{deferred.inverse_scale};
  norms.push_back(of_rest);
  return kernels::total_norm(norms, norm_type);
}

// Lets an optimizer's next step skip, if the program has made its gradients inf or NaN since they
// were checked. There are as many results and flags as before, since each is one call of the hook on
// all ranks.
void note_nonfinite(MixedPrecision::Impl& mixed,
                    const MixedPrecision::Impl::OptimizerRecord& optimizer) {
  MixedPrecision::Impl::Pending* last = nullptr;
  std::vector<at::Tensor> flags;
  for (auto& pending : mixed.pending) {
    if (!concerns(pending, optimizer)) continue;
    last = &pending;
    flags.insert(flags.end(), pending.found_inf.begin(), pending.found_inf.end());
  }
  if (last == nullptr || any_found_inf(flags)) return;  // or the check has found it, for its loss
  const StateMode mode;
  if (last->found_inf.empty()) found_inf_on(last->found_inf, device_of(*optimizer.optimizer));
  // Not in place: other results may have the same flag.
  at::Tensor& flag = last->found_inf.front();
  flag = at::ones_like(flag);
}

}  // namespace

double MixedPrecision::clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                                       double norm_type, bool error_if_nonfinite) {
  impl().note_use();
  Impl::OptimizerRecord& record = impl().of(optimizer, "clip_grad_norm_");
  Impl::require_unscaled(record, "clip_grad_norm_");
  Impl::require_unchanged_since_clipping(record, "clip_grad_norm_");
  impl().pull("clip_grad_norm_");
  Impl::take_unscaled_gradients(record);
  const auto deferred =
      record.masters.has_value() ? record.masters->deferred_gradients() : Masters::Deferred{};
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const at::Tensor& master : deferred.masters) seen.insert(master.unsafeGetTensorImpl());
  std::vector<at::Tensor> others;
  for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) others.push_back(parameter);
  });
  const auto show = c10::make_scope_exit([&] {
    if (record.masters.has_value()) record.masters->show_gradients();
  });
  const double norm = norm_of(deferred, others, norm_type);
  const double factor = optim::clip_factor(norm, max_norm);
  if (!std::isfinite(norm)) {
    if (!error_if_nonfinite) {
      note_nonfinite(impl(), record);
      return norm;
    }
    throw Error("amp.mixed_precision.clip_grad_norm_", "finite gradients",
                "a norm of " + std::to_string(norm),
                "skip the step, or clip with error_if_nonfinite false");
  }
  if (factor == 1) return norm;
  optim::scale_grads_(others, factor);
  if (record.masters.has_value()) record.masters->scale_deferred_gradients(factor);
  return norm;
}

StepResult MixedPrecision::step(torch::optim::Optimizer& optimizer) {
  return impl().step(optimizer);
}

StepResult MixedPrecision::Impl::step(torch::optim::Optimizer& optimizer) {
  note_use();
  OptimizerRecord& record = of(optimizer, "step");
  if (!properties.enabled) {
    emit_gradients(optimizer);
    const events::PhaseScope phase(events::Phase::optimizer);
    optimizer.step();
    clear_cast_cache();
    return Step::stepped;
  }
  prepare_step(record);
  emit_gradients(optimizer, record.masters.has_value() ? &*record.masters : nullptr);
  if (has_fp8()) policy->fp8_scaling().update();
  if (may_defer(record)) {
    return end_step_on_device(record, [&](const at::Tensor& found_inf, const auto& flags) {
      if (record.masters.has_value()) return record.masters->step_unless(found_inf, flags);
      optim::DeferredStep::step(dynamic_cast<optim::FusedOptimizer&>(optimizer), optim::FusedStep(),
                                found_inf, flags);
    });
  }
  return end_step(record, [&] {
    if (record.masters.has_value()) return record.masters->step(properties.fuse_optimizers);
    if (properties.fuse_optimizers && optim::step_in_one_pass(optimizer)) return;
    optimizer.step();
  });
}

void MixedPrecision::Impl::prepare_step(OptimizerRecord& record) {
  const events::PhaseScope phase(events::Phase::optimizer);
  require_unscaled(record, "step");
  require_unchanged_since_clipping(record, "step");
  settle();
  pull("step");
  record.watched = false;
  // Other optimizers' parameters change too, if they are shared.
  for (OptimizerRecord& each : optimizers)
    if (each.component == record.component) each.watch.stop();
  if (record.masters.has_value()) record.masters->hide_gradients();
  drop_stale_results(record);
  warn_of_gradients(record);
  take_unscaled_gradients(record);
  check_earlier_gradients(record);
  warn_of_idle_models(record);
}

// As in torch, gradients that overflowed before the last step and were not zeroed make this one skip,
// too: the later ones were added to them. Masters have none left of that step.
void MixedPrecision::Impl::check_earlier_gradients(OptimizerRecord& record) {
  if (!record.skipped) return;
  std::vector<at::Tensor> parameters;
  record.for_each_without_master(
      [&](const at::Tensor& parameter) { parameters.push_back(parameter); });
  if (parameters.empty()) return;
  // Not a result of several optimizers: the gradients of the others may have been zeroed.
  auto result = std::find_if(pending.begin(), pending.end(), [&](const Pending& one) {
    return one.optimizers.size() == 1 && one.optimizers.front() == &record;
  });
  if (result == pending.end()) {
    const std::vector<OptimizerRecord*> of{&record};
    result = pending.insert(pending.end(), Pending{record.overflowed, of, {}, /*named=*/false});
  }
  const StateMode mode;
  // Not in place: results of other optimizers may have the same flags.
  for (at::Tensor& flag : result->found_inf) flag = flag.clone();
  Gradients pass(1.0F);
  for (const at::Tensor& parameter : parameters) pass.unscale(parameter);
  pass.run(result->found_inf);
}

bool MixedPrecision::Impl::may_defer(const OptimizerRecord& record) const {
  const auto* const fused = dynamic_cast<const optim::FusedOptimizer*>(record.optimizer);
  if (fused == nullptr || record.skip || events::listening() ||
      !optim::DeferredStep::is_supported(*fused))
    return false;
  const c10::Device device = device_of(*record.optimizer);
  bool any = false;
  for (const Pending& one : pending) {
    if (!concerns(one, record)) continue;
    any = true;
    const auto& options = scalers[static_cast<std::size_t>(one.loss_id)].options();
    if (one.optimizers.size() != 1 || options.max_consecutive_skips() != 0 ||
        std::any_of(one.found_inf.begin(), one.found_inf.end(),
                    [&](const at::Tensor& flag) { return flag.device() != device; }))
      return false;
  }
  return any;
}

StepResult MixedPrecision::Impl::end_step_on_device(OptimizerRecord& record,
                                                    const TakeUnless& take) {
  const DisableCasts as_outside;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> flags;
  std::vector<Undecided::Loss> losses;
  for (Pending& one : pending) {
    if (!concerns(one, record)) continue;
    // Without gradients here, other ranks may still have some.
    if (one.found_inf.empty()) found_inf_on(one.found_inf, device_of(*record.optimizer));
    for (at::Tensor& flag : one.found_inf) {
      if (found_inf_hook) found_inf_hook(flag);
      flags.push_back(flag.reshape({}));
      losses.push_back({one.loss_id, one.named});
    }
  }
  const at::Tensor list = at::stack(flags);
  const at::Tensor found_inf = flags.size() == 1 ? flags.front() : list.amax();
  // Before the optimizer's work: the host need not wait for that.
  const auto late = std::make_shared<detail::LateFlags>(list);
  take(found_inf, late);
  // If it throws, a later step still reads them.
  std::erase_if(pending, [&](const Pending& one) { return concerns(one, record); });
  clear_cast_cache();
  if (record.masters.has_value()) record.masters->clear_gradients();
  undecided.push_back({late, std::move(losses), &record});
  return StepResult(late);
}

void MixedPrecision::Impl::settle() {
  for (const Undecided& one : std::exchange(undecided, {})) {
    const std::vector<float>& flags = one.flags->get();
    std::map<std::int64_t, bool> found_by_loss;
    bool skipped = false;
    for (std::size_t i = 0; i < flags.size(); ++i) {
      const auto [id, named] = one.losses[i];
      const bool found = flags[i] != 0;
      if (named) found_by_loss[id] = found_by_loss[id] || found;
      if (!found) continue;
      const bool first = !std::exchange(skipped, true);
      one.optimizer->overflowed = id;
      LossScaler& of_loss = scaler(id, "step");
      if (first && properties.verbosity >= 1 && is_first_rank())
        log()->info("skipped a step: loss {} overflowed at scale {}", id, of_loss.scale());
      first ? of_loss.note_skip({}) : of_loss.note_overflow({});
    }
    for (const auto& [id, found] : found_by_loss) scaler(id, "step").update(found);
    one.optimizer->skipped = skipped;
  }
}

Step MixedPrecision::Impl::end_step(OptimizerRecord& record, const std::function<void()>& take) {
  const auto found_by_loss = resolve(*this, record);
  const bool skip = std::exchange(record.skip, false);
  record.skipped = skip;
  if (!skip) {
    // An optimizer may multiply matrices, which a region would lower.
    const DisableCasts as_outside;
    const events::PhaseScope phase(events::Phase::optimizer);
    take();
    clear_cast_cache();
  }
  if (record.masters.has_value()) record.masters->clear_gradients();
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
  impl().note_use();
  Impl::OptimizerRecord& record = impl().of(optimizer, "zero_grad");
  if (record.masters.has_value()) record.masters->hide_gradients();
  record.watch.stop();
  optimizer.zero_grad();
  record.for_each_leaf([this](const at::Tensor& parameter) {
    parameter.mutable_grad().reset();
    impl().set_aside.erase(parameter.unsafeGetTensorImpl());
  });
  // The results of their check are dropped too.
  if (record.scaled.has_value() && !record.scaled->open) record.scaled.reset();
  record.skip = false;
  for (Impl::Pending& pending : impl().pending) std::erase(pending.optimizers, &record);
  std::erase_if(impl().pending, [](const auto& pending) { return pending.optimizers.empty(); });
}

StepResult step(torch::optim::Optimizer& optimizer) {
  return MixedPrecision::Impl::owner_of(optimizer, "step").step(optimizer);
}

}  // namespace semitone::amp
