#pragma once

#include "semitone/amp/loss_scaler.h"
#include "semitone/amp/parameter_names.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <functional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace semitone::amp {

/// What a step did.
enum class Step {
  stepped,  ///< the optimizer updated its parameters
  skipped,  ///< a gradient was inf or NaN: nothing was changed, and the loss scale may have backed
            ///< off
};

/// See GradScaler::set_found_inf_hook.
using FoundInfHook = std::function<void(at::Tensor& found_inf)>;

/// Scales a loss so that the gradients of a half-precision model do not underflow, takes the scale
/// out of the gradients again, skips the steps where it was too large, and finds a scale that fits.
/// The state machine of torch.amp.GradScaler:
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
///       scaler.unscale_(optimizer);  // only to clip or to look at gradients
///       torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
///       if (scaler.step(optimizer) == amp::Step::skipped) ++skipped;  // unscales, if nobody did
///       scaler.update();  // once an iteration, after all optimizers
///     }
///
/// Differs from torch's where torch's is wrong or says too little (docs/grad_scaler.md):
/// - inf and NaN are looked for in the unscaled gradients. torch looks before it multiplies by
///   1/scale, and once the scale is 0 (or so small that 1/scale is inf) steps on NaN.
/// - The scale has a floor and a ceiling, and may wait for several overflows: LossScaleOptions.
/// - step() says whether it stepped; skips are counted; after max_consecutive_skips it stops and
///   names the parameter.
/// - fp16 gradients are unscaled (in fp32 arithmetic), not refused; sparse ones are coalesced.
/// - An optimizer without a single gradient is not an error: its step does what it does.
/// - A closure cannot be passed: it would run the model again on scaled gradients.
///
/// One host read for each step() — of found_inf, after all gradients of the optimizer were looked
/// at in one pass. An exception, from the optimizer or a hook too, leaves a scaler that goes on.
/// Copyable: the copy has the same state. One thread at a time may use an object.
class GradScaler {
 public:
  /// @param enabled  false: scale() returns its argument and step() only steps, so that one program
  /// serves fp32 too
  explicit GradScaler(const LossScaleOptions& options = {}, bool enabled = true);

  /// loss * scale, recorded by autograd. The result is at least fp32 (an fp16 loss times 65536
  /// would be inf). A disabled scaler returns its argument.
  at::Tensor scale(const at::Tensor& loss);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& losses);

  /// Divides the gradients of the optimizer's parameters by the scale, in place, and looks for inf
  /// and NaN. At most once between two updates, before step(). Error if scale() was never called,
  /// or at a second call.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Calls optimizer.step() unless a gradient is inf or NaN; unscales first if unscale_() was not
  /// called. At most once between two updates. A gradient that became non-finite after unscale_()
  /// is not looked at again (as in torch). LBFGS is refused: it evaluates the model again inside
  /// its step.
  Step step(torch::optim::Optimizer& optimizer);
  Step step(torch::optim::Optimizer& optimizer,
            const torch::optim::Optimizer::LossClosure& closure) = delete;

  /// Moves the scale by what the steps since the last update found: an overflow in any optimizer
  /// backs off. Error if no gradients were looked at, or if after unscale_() the optimizer stepped
  /// past step(), as far as its state tells. DivergedError after max_consecutive_skips
  /// skipped iterations in a row.
  void update();

  /// Sets the scale instead; positive and finite. What the steps found is forgotten, the counters
  /// stay.
  void update(double new_scale);

  /// The scale that scale() multiplies by; 1 if disabled. No device is read.
  double get_scale() const { return enabled_ ? scaler_.scale() : 1.0; }
  bool is_enabled() const { return enabled_; }

  /// The rule, the state and the counters: scaler().skipped_steps(), scaler().consecutive_skips() …
  const LossScaler& scaler() const { return scaler_; }
  /// Changes hyperparameters while training; the scale and its counters stay.
  void set_options(const LossScaleOptions& options) { scaler_.set_options(options); }

  /// Names for messages: parameters of the model are called by their names in it. Without, a
  /// parameter is called by its place in the optimizer ("group 0, parameter 3").
  void name_parameters(const Model& model) { names_.add(model); }

  /// Called with found_inf (fp32, one element, on the gradients' device: 0 or 1) of an optimizer
  /// before it is read, by step() or, after unscale_() alone, by update(), so that ranks which do
  /// not share all gradients can agree: a MAX all-reduce. Default: none.
  void set_found_inf_hook(FoundInfHook hook) { found_inf_hook_ = std::move(hook); }

  /// Everything that a resumed run needs to go on bit for bit. Error between unscale_() or step()
  /// and update(). A disabled scaler saves only that it is disabled; loading that into an enabled
  /// one is an Error.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  // How far an optimizer is whose gradients are unscaled.
  struct Progress {
    std::vector<at::Tensor> found_inf;  // one a device, at least one
    bool stepped = false;               // or skipped
    bool overflowed = false;            // found_inf as the host read it, valid once stepped
    std::int64_t state = 0;             // of the optimizer, when gradients were unscaled
  };

  void require_scaled(const char* caller) const;
  bool read(Progress& progress) const;

  LossScaler scaler_;
  bool enabled_;
  bool scaled_ = false;   // scale() was called at least once
  bool stepped_ = false;  // step() was
  std::unordered_map<const torch::optim::Optimizer*, Progress> progress_;  // since the last update
  ParameterNames names_;
  FoundInfHook found_inf_hook_;
};

}  // namespace semitone::amp
