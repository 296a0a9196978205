#include "semitone/scaling/grad_scaler.h"

#include "semitone/autocast/autocast.h"
#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "semitone/optim/fused_optimizer.h"
#include "src/core/archive.h"
#include "src/core/log.h"
#include "src/optim/deferred_step.h"
#include "src/scaling/gradient_events.h"
#include "src/scaling/gradients.h"
#include "src/scaling/late_flags.h"
#include "src/scaling/step_watch.h"
#include "src/scaling/unscaled_gradients.h"

#include <torch/serialize.h>
#include <torch/types.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace semitone::amp {

GradScaler::GradScaler(const LossScaleOptions& options, bool enabled)
    : scaler_(options), enabled_(enabled) {}

GradScaler::Unscaled::Unscaled() : shared_(std::make_shared<UnscaledGradients>()) {}
GradScaler::Unscaled::Unscaled(const Unscaled& other)
    : shared_(std::make_shared<UnscaledGradients>(*other.shared_)) {}
GradScaler::Unscaled& GradScaler::Unscaled::operator=(const Unscaled& other) {
  if (this != &other) shared_ = std::make_shared<UnscaledGradients>(*other.shared_);
  return *this;
}

at::Tensor GradScaler::scale(const at::Tensor& loss) {
  if (!enabled_) return loss;
  settle_update();
  at::Tensor scaled = scaler_.scaled(loss);
  if (scaled.requires_grad()) {
    scaled.register_hook([unscaled = unscaled_.shared()](const at::TensorBase& /*grad*/) {
      unscaled->begin_backward();
    });
  }
  scaled_ = true;
  return scaled;
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& losses) {
  std::vector<at::Tensor> scaled;
  scaled.reserve(losses.size());
  for (const at::Tensor& loss : losses) scaled.push_back(scale(loss));
  return scaled;
}

void GradScaler::require_scaled(const char* caller) const {
  if (!scaled_) {
    throw Error(std::string("amp.grad_scaler.") + caller, "scale() to be called before", "no call",
                "back-propagate scaler.scale(loss), not loss");
  }
}

// Error if a backward pass after unscale_() has left scaled gradients.
void GradScaler::require_unscaled(torch::optim::Optimizer& optimizer,
                                  const Progress& progress) const {
  if (unscaled_->backwards() == progress.backwards) return;
  for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
    if (!parameter.grad().defined() || unscaled_->has(parameter)) return;
    throw Error("amp.grad_scaler.step", "gradients that are unscaled",
                "those of a backward pass after unscale_()",
                "call unscale_() after the last backward pass of an iteration");
  });
}

// With master weights of amp::initialize, for example, the optimizer has other parameters than the
// model.
void GradScaler::warn_of_no_gradient(torch::optim::Optimizer& optimizer) {
  if (warned_ || found_inf_hook_) return;
  bool any = false;
  for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
    any = any || parameter.grad().defined();
  });
  if (any) return;
  warned_ = true;
  log()->warn(
      "scaler.step(optimizer) without any gradient: does the optimizer belong to the model that "
      "computed the loss? (After amp::initialize, call the functions of MixedPrecision instead. "
      "In C, with masters, pass the tensors of semitone_masters_list().)");
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!enabled_) return;
  require_scaled("unscale_");
  if (const auto found = progress_.find(&optimizer); found != progress_.end()) {
    throw Error("amp.grad_scaler.unscale_", "one call for each optimizer between two updates",
                found->second.stepped ? "a call after step()" : "a second call",
                "call update() once at the end of an iteration");
  }
  settle_update();
  const events::PhaseScope phase(events::Phase::unscale);
  Gradients scaled(scaler_.inverse());
  Gradients unscaled(1.0F);  // only checked
  for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
    (unscaled_->has(parameter) ? unscaled : scaled).unscale(parameter);
  });
  Progress progress;
  progress.backwards = unscaled_->backwards();
  unscaled.run(progress.found_inf);
  scaled.run(progress.found_inf);
  for_each_parameter(optimizer, [&](std::size_t, std::size_t, const at::Tensor& parameter) {
    unscaled_->note(parameter);
  });
  emit_unscaled_gradients(optimizer);
  // Without gradients here, other ranks may still have some.
  if (progress.found_inf.empty()) found_inf_on(progress.found_inf, device_of(optimizer));
  if (!stepped_) {
    progress.watch = std::make_shared<StepWatch>();
    progress.watch->start(optimizer);
  }
  progress_.emplace(&optimizer, std::move(progress));
}

// Whether a gradient is not finite, here or on another rank.
bool GradScaler::read(Progress& progress) const {
  const events::PhaseScope phase(events::Phase::unscale);
  call_hook(progress);
  return any_found_inf(progress.found_inf);
}

void GradScaler::call_hook(Progress& progress) const {
  if (!found_inf_hook_) return;
  const events::PhaseScope phase(events::Phase::communication);
  // One flag, on however many devices this rank has gradients: other ranks may have other devices.
  std::vector<at::Tensor>& flags = progress.found_inf;
  const auto on_device =
      std::ranges::find_if(flags, [](const auto& flag) { return !flag.is_cpu(); });
  at::Tensor all = on_device == flags.end() ? flags.front() : *on_device;
  for (const at::Tensor& flag : flags) {
    if (!flag.is_same(all)) all = at::maximum(all, flag.to(all.device()));
  }
  found_inf_hook_(all);
  flags = {all};
}

// Whether the device can decide the step. The host must decide if it needs the names of parameters,
// for which it has to look at the gradients.
bool GradScaler::may_defer(torch::optim::Optimizer& optimizer, const Progress& progress) const {
  const auto* const fused = dynamic_cast<const optim::FusedOptimizer*>(&optimizer);
  return fused != nullptr && !events::listening() &&
         scaler_.options().max_consecutive_skips() == 0 && progress.found_inf.size() == 1 &&
         optim::DeferredStep::is_supported(*fused) &&
         progress.found_inf.front().device() == device_of(optimizer);
}

StepResult GradScaler::step_on_device(torch::optim::Optimizer& optimizer,
                                      Progress& progress) const {
  call_hook(progress);
  const at::Tensor& found_inf = progress.found_inf.front();
  progress.late = std::make_shared<detail::LateFlags>(found_inf.reshape({1}));
  progress.stepped = true;
  optim::DeferredStep::step(dynamic_cast<optim::FusedOptimizer&>(optimizer), optim::FusedStep(),
                            found_inf, progress.late);
  clear_cast_cache();
  return StepResult(progress.late);
}

// Does what the last update() could not do yet.
void GradScaler::settle_update() const {
  const Update update = std::exchange(update_, {});
  if (update.late.empty()) return;
  bool overflowed = update.overflowed;
  for (const auto& late : update.late) {
    if (!late->any_set()) continue;
    overflowed = true;
    scaler_.note_skip({});
  }
  scaler_.update(overflowed);
}

// The same for the steps since.
void GradScaler::settle_all() const {
  settle_update();
  for (auto& [optimizer, progress] : progress_) {
    if (progress.late == nullptr) continue;
    progress.overflowed = std::exchange(progress.late, nullptr)->any_set();
    if (progress.overflowed) scaler_.note_skip({});
  }
}

const LossScaler& GradScaler::scaler() const {
  settle_all();
  return scaler_;
}

void GradScaler::set_options(const LossScaleOptions& options) {
  settle_all();
  scaler_.set_options(options);
}

StepResult GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!enabled_) {
    emit_gradients(optimizer);
    const events::PhaseScope phase(events::Phase::optimizer);
    optimizer.step();
    clear_cast_cache();
    return Step::stepped;
  }
  require_scaled("step");
  stepped_ = true;
  if (evaluates_loss(optimizer)) {
    throw Error("amp.grad_scaler.step",
                "an optimizer that does not evaluate the loss inside its step", "LBFGS",
                "its gradients would be scaled there: train without a scaler");
  }
  warn_of_no_gradient(optimizer);
  if (const auto found = progress_.find(&optimizer); found == progress_.end()) {
    unscale_(optimizer);
  } else if (!found->second.stepped) {
    require_unscaled(optimizer, found->second);
  }
  Progress& progress = progress_.at(&optimizer);
  if (progress.stepped) {
    throw Error("amp.grad_scaler.step", "one call for each optimizer between two updates",
                "a second call", "call update() once at the end of an iteration");
  }
  emit_gradients(optimizer);
  if (may_defer(optimizer, progress)) return step_on_device(optimizer, progress);
  progress.overflowed = read(progress);
  progress.stepped = true;
  if (progress.overflowed) {
    scaler_.note_skip(scaler_.wants_names() ? find_overflow(optimizer, names_)
                                            : detail::Overflow{});
    return Step::skipped;
  }
  const events::PhaseScope phase(events::Phase::optimizer);
  optimizer.step();
  clear_cast_cache();
  return Step::stepped;
}

void GradScaler::update() {
  if (!enabled_) return;
  require_scaled("update");
  if (progress_.empty()) {
    throw Error("amp.grad_scaler.update", "step() or unscale_() before",
                "neither since the last update",
                "call scaler.step(optimizer), not optimizer.step()");
  }
  for (auto& [optimizer, progress] : progress_) {
    if (stepped_ || progress.watch == nullptr || !progress.watch->state_shows_step(*optimizer))
      continue;
    progress.watch = nullptr;  // reported once
    throw Error("amp.grad_scaler.update", "scaler.step(optimizer) after unscale_()",
                "optimizer.step(), which steps on inf", "call scaler.step(optimizer) instead");
  }
  settle_update();
  Update next;
  for (auto& [optimizer, progress] : progress_) {
    if (progress.late != nullptr) {
      next.late.push_back(progress.late);
    } else {
      next.overflowed =
          (progress.stepped ? progress.overflowed : read(progress)) || next.overflowed;
    }
  }
  progress_.clear();
  unscaled_->clear();
  if (next.late.empty()) return scaler_.update(next.overflowed);
  update_ = std::move(next);
}

void GradScaler::update(double new_scale) {
  if (!enabled_) return;
  require_scaled("update");
  settle_all();
  scaler_.set_scale(new_scale);
  progress_.clear();
  unscaled_->clear();
}

void GradScaler::save(torch::serialize::OutputArchive& archive) const {
  if (!progress_.empty()) {
    throw Error("amp.grad_scaler.save", "a call between two iterations", "one before update()",
                "save after update()");
  }
  settle_update();
  archive.write("enabled", c10::IValue(enabled_));
  if (enabled_) scaler_.save(archive);
}

void GradScaler::load(torch::serialize::InputArchive& archive) {
  constexpr auto kComponent = "amp.grad_scaler.load";
  const bool was_enabled = read_value<bool>(archive, "enabled", kComponent);
  if (!enabled_) return;
  if (!was_enabled) {
    throw FileError(kComponent, "the state of an enabled scaler", "that of a disabled one",
                    "construct the scaler with enabled = false, or do not load its state");
  }
  settle_update();
  scaler_.load(archive);
  progress_.clear();
  unscaled_->clear();
}

}  // namespace semitone::amp
