#pragma once

#include "semitone/scaling/detail/parameter_names.h"
#include "semitone/scaling/loss_scaler.h"
#include "semitone/scaling/step.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace semitone::amp {

class StepWatch;
class UnscaledGradients;

/// See GradScaler::set_found_inf_hook.
using FoundInfHook = std::function<void(at::Tensor& found_inf)>;

/// Scales a loss so that the gradients of a half-precision model do not underflow, unscales the
/// gradients, skips steps in which the scale was too large, and adapts the scale. It follows the
/// state machine of torch.amp.GradScaler:
///
///     amp::GradScaler scaler;
///     for (auto& batch : *loader) {
///       optimizer.zero_grad();
///       torch::Tensor loss;
///       {
///         amp::Autocast region(torch::kCUDA);
///         loss = loss_fn(model->forward(batch.data), batch.target);
///       }
///       scaler.scale(loss).backward();
///       scaler.unscale_(optimizer);  // only to clip or to inspect gradients
///       torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
///       if (scaler.step(optimizer) == amp::Step::skipped) ++skipped;  // unscales if necessary
///       scaler.update();  // once an iteration, after all optimizers
///     }
///
/// It differs from torch's scaler where that is wrong or reports too little (docs/grad_scaler.md):
/// - The unscaled gradients are checked for inf and NaN. torch checks before it multiplies by
///   1/scale. Once torch's scale is 0, or so small that 1/scale is inf, its optimizer steps on NaN.
/// - The scale has a lower and an upper bound, and may back off after several overflows only:
///   LossScaleOptions.
/// - step() returns whether it stepped, and skips are counted. After max_consecutive_skips an error
///   names the parameter whose gradient overflowed.
/// - fp16 gradients, which torch refuses, are unscaled in fp32 arithmetic. Sparse gradients are
///   coalesced.
/// - An optimizer without any gradient is not an error: its step() is called as usual.
/// - The gradient of a parameter that is in several optimizers is divided by the scale once. torch
///   divides it once for each of them.
/// - A closure cannot be passed, since the optimizer would evaluate the model again while gradients
///   are scaled.
///
/// step() takes one pass over all gradients of the optimizer, and then reads found_inf once from
/// the device. It reads nothing if the device decides the step, as with torch's fused optimizers.
/// That is so for a semitone::optim optimizer whose parameters are all on one device other than the
/// CPU, as long as no event listener and no max_consecutive_skips needs the name of the parameter
/// that overflowed. The host then learns the outcome when it is used, or at the next call of
/// scale(), get_scale(), scaler(), save() or of a setter. These calls wait for the check of the
/// gradients, but not for the optimizer's work, which is behind it in the device's queue. Results
/// are the same.
///
/// After an exception, also from the optimizer or a hook, the scaler stays usable. A copy has the
/// same state; in one iteration, use only one of them. Only one thread at a time may use an object.
class GradScaler {
 public:
  /// @param enabled  false: scale() returns its argument and step() only steps, so that one program
  ///                 serves fp32 too
  explicit GradScaler(const LossScaleOptions& options = {}, bool enabled = true);

  /// Returns loss * scale, recorded by autograd, in fp32 or wider, since an fp16 loss times 65536
  /// would be inf. A disabled scaler returns its argument.
  at::Tensor scale(const at::Tensor& loss);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& losses);

  /// Divides the gradients of the optimizer's parameters by the scale, in place, and checks for inf
  /// and NaN. May be called once between two updates, before step(). Error if scale() was never
  /// called, or at a second call.
  ///
  /// A parameter may be in several optimizers. A gradient that was unscaled for one of them since
  /// the last update is only checked for the others, even if it was clipped or replaced in the
  /// meantime. After zero_grad() and another backward pass of a scaled loss it is unscaled again.
  /// Call unscale_() after the last backward pass of an iteration: a later one adds scaled gradients
  /// to those that are not scaled any more, and step() refuses them.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Calls optimizer.step() unless a gradient is inf or NaN. Unscales first if unscale_() was not
  /// called. May be called once per optimizer between two updates. Gradients are not checked again
  /// after unscale_(), as in torch. LBFGS is an Error: it evaluates the model again inside its
  /// step. So are gradients of a scaled loss's backward pass since unscale_(). If no parameter has a
  /// gradient, the optimizer steps, and a warning is logged once.
  StepResult step(torch::optim::Optimizer& optimizer);
  StepResult step(torch::optim::Optimizer& optimizer,
                  const torch::optim::Optimizer::LossClosure& closure) = delete;

  /// Updates the scale with the results of the steps since the last update: an overflow in any
  /// optimizer backs the scale off. Error if no gradients were checked, or if the optimizer's state
  /// shows that optimizer.step() was called after unscale_() instead of this class's step(). (The
  /// latter is checked only as long as step() of this object has never been called.) DivergedError
  /// after max_consecutive_skips consecutive skipped iterations.
  void update();

  /// Sets the scale, which must be positive and finite. Drops the results of the steps; counters
  /// stay. Error before the first scale(): set init_scale instead.
  void update(double new_scale);

  /// Returns the scale that scale() multiplies by; 1 if disabled. Does not read from a device, but
  /// may wait for the outcome of a step that a device decides.
  double get_scale() const { return enabled_ ? scaler().scale() : 1.0; }
  bool is_enabled() const { return enabled_; }

  /// Returns options, state and counters: scaler().skipped_steps(), scaler().consecutive_skips() …
  const LossScaler& scaler() const;
  /// Replaces the options during training. The scale and its counters stay.
  void set_options(const LossScaleOptions& options);

  /// Sets the names of parameters in messages to their names in the model. Without names, messages
  /// give a parameter's place in the optimizer ("group 0, parameter 3").
  void name_parameters(const Model& model) { names_.add(model); }

  /// Sets a hook through which ranks that do not share all gradients agree, with a MAX all-reduce.
  /// The hook gets an optimizer's found_inf (fp32, one element, on the gradients' device: 0 or 1)
  /// before the host reads it. step() calls the hook, or update() if only unscale_() was called.
  /// Default: none.
  void set_found_inf_hook(FoundInfHook hook) { found_inf_hook_ = std::move(hook); }

  /// Saves and loads everything that a resumed run needs to continue bit for bit. save() is an Error
  /// between unscale_() or step() and update(); load() drops their results. A disabled scaler saves
  /// only that it is disabled; loading that into an enabled one is an Error.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  // The state of an optimizer whose gradients are unscaled.
  struct Progress {
    std::vector<at::Tensor> found_inf;  // one a device, at least one
    bool stepped = false;               // or skipped
    bool overflowed = false;            // found_inf as read by the host; valid if stepped, not late
    std::shared_ptr<detail::LateFlags> late = {};  // found_inf if the device has decided the step
    std::shared_ptr<StepWatch> watch = {};  // since gradients were unscaled, until the first step()
    std::int64_t backwards = 0;             // passes of scaled losses, by then
  };

  // An update of the scale whose result is not known yet.
  struct Update {
    bool overflowed = false;  // as far as it is known
    std::vector<std::shared_ptr<detail::LateFlags>> late;
  };

  void require_scaled(const char* caller) const;
  void require_unscaled(torch::optim::Optimizer& optimizer, const Progress& progress) const;
  void warn_of_no_gradient(torch::optim::Optimizer& optimizer);
  bool read(Progress& progress) const;
  void call_hook(Progress& progress) const;
  bool may_defer(torch::optim::Optimizer& optimizer, const Progress& progress) const;
  StepResult step_on_device(torch::optim::Optimizer& optimizer, Progress& progress) const;
  void settle_update() const;
  void settle_all() const;

  // Mutable, with progress_: reading a result that is late changes nothing that a caller sees.
  mutable LossScaler scaler_;
  mutable Update update_;
  bool enabled_;
  bool scaled_ = false;   // scale() was called at least once
  bool stepped_ = false;  // step() was called
  bool warned_ = false;   // of a step without gradients
  // Since the last update.
  mutable std::unordered_map<const torch::optim::Optimizer*, Progress> progress_;
  // Shared with the losses of scale(); a copy of the scaler has a copy of it.
  class Unscaled {
   public:
    Unscaled();
    Unscaled(const Unscaled& other);
    Unscaled& operator=(const Unscaled& other);
    Unscaled(Unscaled&&) noexcept = default;
    Unscaled& operator=(Unscaled&&) noexcept = default;
    ~Unscaled() = default;
    UnscaledGradients* operator->() const { return shared_.get(); }
    const std::shared_ptr<UnscaledGradients>& shared() const { return shared_; }

   private:
    std::shared_ptr<UnscaledGradients> shared_;
  };
  Unscaled unscaled_;
  detail::ParameterNames names_;
  FoundInfHook found_inf_hook_;
};

}  // namespace semitone::amp
