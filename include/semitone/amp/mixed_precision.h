#pragma once

#include "semitone/amp/opt_level.h"
#include "semitone/amp/scaled_loss.h"
#include "semitone/autocast/autocast.h"
#include "semitone/autocast/cast_tree.h"
#include "semitone/autocast/fp8_scaling.h"
#include "semitone/autocast/model.h"
#include "semitone/core/detail/call_script.h"
#include "semitone/scaling/grad_scaler.h"
#include "semitone/scaling/loss_scaler.h"
#include "semitone/scaling/step.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace semitone::amp {

/// References to one or several optimizers.
using OptimizerRef = std::reference_wrapper<torch::optim::Optimizer>;
using OptimizerRefs = std::vector<OptimizerRef>;

/// The state of mixed-precision training, as returned by amp::initialize. Several objects may exist
/// at a time; each manages its own models and optimizers only. Movable. Use it from one thread at a
/// time. Where it goes to another thread, wait for the end of its first call there before the old
/// thread calls scale_loss of another object, which looks at all that the thread has used last.
class [[nodiscard]] MixedPrecision {
 public:
  MixedPrecision(MixedPrecision&&) noexcept;
  MixedPrecision& operator=(MixedPrecision&&) noexcept;
  ~MixedPrecision();

  const Properties& properties() const;

  /// Runs model->forward(arguments...) as the level requires: floating arguments, also nested ones
  /// (see map_tensors), are cast to cast_model_type, operators run under the policy at O1, and
  /// results are cast to cast_model_outputs. fp64 tensors are not cast.
  ///
  /// Outside of autocast(), model->forward(…) runs in fp32 at O1. At O2 and O3 its floating-point
  /// arguments must be in 16 bits. step() warns, once per model, about a trained model that never
  /// ran in mixed precision.
  /// @param model  an initialized model, or a module inside one (`model->decoder`). It may be a
  /// module holder, shared pointer, AnyModule or reference. It may also be a torch::jit::Module,
  /// which takes IValues (or arguments that convert to them) or a std::vector<IValue> of all
  /// inputs, with or without torch::jit::Kwargs, and returns an IValue. Finally it may be a wrapper
  /// of these with a forward() of its own, such as parallel::DistributedDataParallel. Error for any
  /// other model, and for a model that has moved to another device.
  /// @param arguments  deduced as in any function template. Braces have no type, so write
  /// torch::Tensor() instead of `{}` for "no mask". They are passed on as copies: for a forward
  /// that takes a reference to change it, such as a cache, use call() with a lambda that has it
  template <typename M, typename... Arguments>
  auto forward(M& model, Arguments&&... arguments) {
    const auto region = enter(handle_of(model));
    const auto cast = [this](const auto& leaf) { return this->cast_input(leaf); };
    if constexpr (std::is_same_v<std::remove_const_t<M>, torch::jit::Module>) {
      return cast_output(semitone::detail::call_script(
          model, map_tensors(std::forward<Arguments>(arguments), cast)...));
    } else if constexpr (requires {
                           model.forward(map_tensors(std::forward<Arguments>(arguments), cast)...);
                         }) {
      const auto run = [&](auto&&... cast_arguments) -> decltype(auto) {
        return model.forward(std::forward<decltype(cast_arguments)>(cast_arguments)...);
      };
      return with_cast_results(run, map_tensors(std::forward<Arguments>(arguments), cast)...);
    } else {
      const auto run = [&](auto&&... cast_arguments) -> decltype(auto) {
        return model->forward(std::forward<decltype(cast_arguments)>(cast_arguments)...);
      };
      return with_cast_results(run, map_tensors(std::forward<Arguments>(arguments), cast)...);
    }
  }

  /// Runs other code of the models as forward() does: returns function(arguments...) with the
  /// arguments cast, inside the region, and with the results cast.
  ///
  ///     auto image = mixed.call([&](const at::Tensor& z) { return vae->decode(z); }, latent);
  template <typename Function, typename... Arguments>
  auto call(Function&& function, Arguments&&... arguments) {
    const auto region = enter_any();
    const auto cast = [this](const auto& leaf) { return this->cast_input(leaf); };
    return with_cast_results(function, map_tensors(std::forward<Arguments>(arguments), cast)...);
  }

  /// Returns the region in which forward() runs, for losses and for other methods of the models. It
  /// may cover a whole program. The program then needs no change where it calls model->forward(…),
  /// for example in evaluation. At O1 it casts as the policy says. At O2 and O3, fp32 arguments
  /// that meet 16-bit weights in a matrix product, a recurrent network, a normalisation layer or
  /// prelu are cast to 16 bits, since LibTorch refuses mixed dtypes there. The arguments of
  /// LibTorch's loss functions are cast to fp32. Results keep the dtype of the computation. At O0 it
  /// casts nothing. ScaledLoss::backward() and step() run without casts, also inside the region.
  Autocast autocast() const;

  /// Scales a loss; see ScaledLoss. Error for an unknown optimizer or loss_id.
  ScaledLoss scale_loss(const at::Tensor& loss, torch::optim::Optimizer& optimizer,
                        ScaleLossOptions options = {});
  /// The same for several optimizers.
  /// @param optimizers  at least one; their parameters get gradients from this loss
  ScaledLoss scale_loss(const at::Tensor& loss, const OptimizerRefs& optimizers,
                        ScaleLossOptions options = {});

  /// Steps the optimizer and writes the master weights into the model. Skips the step instead if a
  /// gradient overflowed in a backward pass of scale_loss(loss, optimizer) since the last step.
  /// Other optimizers that were named for the same loss also skip their next step. Updates the
  /// scales of those losses, once for any number of accumulated backward passes, and those of fp8
  /// (Fp8Scaling::update). Drops the masters' gradients.
  ///
  /// Reads once from the device, or not at all if the device decides the step. That is so for a
  /// semitone::optim optimizer whose parameters are all on one device other than the CPU, under
  /// three conditions: no other optimizer was named for its losses, no event listener and no
  /// max_consecutive_skips needs the name of the parameter that overflowed, and step() has to skip
  /// for no other reason. The host then learns the outcome when it is used, or at the next
  /// scale_loss, step, loss_scaler, skipped_steps, save or load. These wait for the check of the
  /// gradients, but not for the optimizer's work, which is behind it in the device's queue. Results
  /// are the same. The log reports the skipped step then, without the name of a parameter.
  ///
  /// Gradients of scale_loss are checked for inf and NaN, except in plain training: with a constant
  /// loss scale of 1 and without master weights. Those of `loss.backward()` alone are not, at any
  /// level. If nothing zeroes gradients that overflowed, the steps after the skipped one are skipped
  /// too, as in torch: the next gradients are added to them.
  ///
  /// Error while gradients are scaled: before ScaledLoss::finish(), or after a backward pass with
  /// ScaleLossOptions::delay_unscale. For DivergedError see LossScaleOptions::max_consecutive_skips;
  /// the step is then counted as skipped.
  StepResult step(torch::optim::Optimizer& optimizer);

  /// Returns the parameters that the optimizer updates: master weights and fp32 parameters. After
  /// backward their gradients can be clipped; clip_grad_norm_ does that at less cost.
  std::vector<at::Tensor> master_params(torch::optim::Optimizer& optimizer) const;

  /// Clips the norm of the gradients of master_params, after backward and before step(), and
  /// returns the norm before clipping. Works as optim::clip_grad_norm_, except for gradients that
  /// step() reads from the model in 16 bits (a semitone::optim optimizer at O2 with a scale of 1):
  /// these stay in the model as they are, and step() multiplies them by the clipping factor when it
  /// reads them. Change gradients before that: changes since are an Error of step() and of
  /// master_params there. (LibTorch's functions that clip gradients write through data(). That is
  /// only noticed on a CPU, by 16 elements of each gradient.)
  ///
  /// If the norm is not finite, nothing is clipped, and step() skips. Exceptions: where gradients are
  /// not checked (see step()), and where another optimizer that the loss was named for has stepped
  /// since, it applies the non-finite ones; use error_if_nonfinite there. Error
  /// while gradients are scaled, as in step(), for a norm_type that is not above 0, and for a
  /// negative max_norm.
  /// @param norm_type  order of the norm; infinity: the largest magnitude
  /// @param error_if_nonfinite  Error if the norm is inf or NaN, before anything is changed
  double clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                         double norm_type = 2.0, bool error_if_nonfinite = false);

  /// Drops the gradients of the optimizer's parameters and their masters, and the result of the
  /// check for inf and NaN. After a step, optimizer.zero_grad() or model->zero_grad() has the same
  /// effect. To discard a backward pass without a step, call this function.
  void zero_grad(torch::optim::Optimizer& optimizer);

  /// Returns the scaler of a loss. The reference stays valid as long as this object and those that it
  /// is moved to. If a device decides steps, its values are those of this call.
  const LossScaler& loss_scaler(std::int64_t loss_id = 0) const;
  /// Lowers a dynamic loss scale without an overflow, for example after a spike of the loss that a
  /// DivergenceGuard has found. It does what LossScaler::back_off does, from the next scale_loss
  /// on. Returns whether the scale has changed: false if it is constant, as it is for bf16 by
  /// default, or at its lower bound. Error for an unknown loss_id, and while gradients are scaled,
  /// as in step().
  ///
  /// This helps if values overflow in the backward pass and no parameter's gradient shows it,
  /// because a mask, a clamp or a saturating cast (as to fp8) removes the infinities. It also saves
  /// skipped steps if gradients grow faster than the scale backs off by itself. It does not help
  /// against bad batches and high learning rates, since a scale does not change gradients that do
  /// not overflow. A scale that is lowered too often makes small gradients 0 in fp16.
  bool back_off_loss_scale(std::int64_t loss_id = 0);
  /// Returns the number of skipped steps of all optimizers.
  std::int64_t skipped_steps() const;

  /// While this object exists, the model's parameters and buffers are fp32, with the exact values
  /// of master weights. Use it for saving, loading, exporting and averaging: weights are saved in
  /// fp32 at every level, and training continues with the values that were loaded or changed
  /// meanwhile. Do not call forward() or step() during that time.
  ///
  ///     { const auto fp32 = mixed.fp32_weights(model); torch::save(model, "model.pt"); }
  class [[nodiscard]] Fp32Weights {
   public:
    ~Fp32Weights();
    Fp32Weights(Fp32Weights&&) noexcept;
    Fp32Weights& operator=(Fp32Weights&&) = delete;
    /// Casts back, as the destructor does, but reports errors. Error if a tensor's shape has
    /// changed; that tensor gets its earlier value back, and the values of the other tensors are
    /// kept. (The destructor logs the error instead.)
    void end();

    /// Casts back without taking over values: for code that has only read them. Writes nothing,
    /// where end() writes all weights.
    void discard();

   private:
    friend class MixedPrecision;
    struct Saved;
    explicit Fp32Weights(std::unique_ptr<Saved> saved);
    std::unique_ptr<Saved> saved_;
  };
  Fp32Weights fp32_weights(const Model& model);

  /// Saves or loads a model inside fp32_weights(), as torch::save and torch::load do. A TorchScript
  /// module uses its own format. save_model writes a complete file or none. load_model accepts
  /// every format of weights::read, with any floating dtypes. FileError if the file cannot be
  /// written or read, or does not match the model, which is then unchanged.
  ///
  /// torch::load without fp32_weights() works as well. LibTorch 2.11 puts the bytes of an fp32 file
  /// into a 16-bit tensor; the next forward, autocast, scale_loss, step or save detects that and
  /// converts the values. (Error if other tensors share the loaded memory, such as those of an
  /// InputArchive that still exists.) Inside a region torch::load of a file of another dtype is an
  /// Error at the first 16-bit tensor; those before it are loaded. torch::save without
  /// fp32_weights() writes 16 bits, which an fp32 model cannot load.
  void save_model(const Model& model, const std::string& path);
  void load_model(const Model& model, const std::string& path);

  /// Saves or loads loss scalers, master weights and the scales of fp8. Together with the state of model and
  /// optimizer, this is all that a resumed run needs to continue bit for bit. Save models inside
  /// fp32_weights(). Model, optimizer and this state may be loaded in any order, before or after
  /// the first step.
  ///
  /// save() is an Error between scale_loss and the step() or zero_grad() of this object; but not where
  /// scale_loss changes nothing (a constant scale of 1, no masters): gradients there look like those
  /// of the last step. A resumed run has no gradients, and load() drops them: save after the steps of
  /// all optimizers. If a loss that was scaled for several optimizers overflowed, those that have not
  /// stepped since skip their next step in a resumed run, too.
  /// It throws FileError, and changes nothing, unless level, dtype, the shapes of the masters and
  /// the numbers of models, optimizers and losses equal those of the saved run. Loss scales keep the
  /// options of the saved run, with a warning where they differ, except max_consecutive_skips.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

  /// Sets a hook with which ranks agree on found_inf, as GradScaler::set_found_inf_hook does.
  /// step() calls the hook for each loss of the optimizer, in the order of their first backward,
  /// except in plain training, which has no checks. DistributedDataParallel needs no hook: an inf
  /// on one rank reaches the mean on all ranks.
  void set_found_inf_hook(FoundInfHook hook);

  /// Returns the scales of products in fp8 (CastPolicy::fp8 of Options::policy), for ranks to agree
  /// on (Fp8Scaling::set_amax_hook) and to look at. step() calls update(), and save() and load()
  /// include them. Error if the policy has no fp8().
  Fp8Scaling fp8_scaling() const;

  /// The implementation.
  struct Impl;

 private:
  friend MixedPrecision initialize(const std::vector<Model>&, const OptimizerRefs&, const Options&);
  friend class CapturedStep;
  explicit MixedPrecision(std::unique_ptr<Impl> impl);
  // Error for an object that was moved from.
  Impl& impl() const;

  // For forward: the address that identifies the model, and the region.
  static const void* handle_of(const torch::nn::Module& module) { return &module; }
  static const void* handle_of(const torch::jit::Module& module) { return module._ivalue().get(); }
  template <typename Held>
  static auto handle_of(const Held& held) -> decltype(handle_of(*held)) {
    return handle_of(*held);
  }
  static const void* handle_of(const torch::nn::AnyModule& module) { return module.ptr().get(); }
  // Returns function(arguments...), which may be void, with its tensors cast. The arguments live
  // until then: a result may refer to one.
  template <typename Function, typename... Arguments>
  auto with_cast_results(Function& function, Arguments&&... arguments) const {
    const auto uncast = [this](const auto& leaf) { return this->cast_output(leaf); };
    if constexpr (std::is_void_v<decltype(std::invoke(function,
                                                      std::forward<Arguments>(arguments)...))>) {
      std::invoke(function, std::forward<Arguments>(arguments)...);
    } else {
      return map_tensors(std::invoke(function, std::forward<Arguments>(arguments)...), uncast);
    }
  }
  struct Region;
  std::shared_ptr<Region> enter(const void* model) const;
  std::shared_ptr<Region> enter_any() const;
  at::Tensor cast_input(const at::Tensor& tensor) const;
  c10::IValue cast_input(const c10::IValue& value) const;
  at::Tensor cast_output(const at::Tensor& tensor) const;
  c10::IValue cast_output(const c10::IValue& value) const;

  std::unique_ptr<Impl> impl_;
};

/// Calls scale_loss() or step() of the MixedPrecision that manages the optimizer, in functions that
/// have the optimizer only. Apex: amp.scale_loss.
///
///     void train(Net& model, Loader& loader, torch::optim::Optimizer& optimizer) {
///       for (auto& batch : loader) {
///         …
///         amp::scale_loss(loss, optimizer).backward();
///         amp::step(optimizer);
///       }
///     }
///
/// Error unless exactly one existing MixedPrecision manages the optimizer.
ScaledLoss scale_loss(const at::Tensor& loss, torch::optim::Optimizer& optimizer,
                      ScaleLossOptions options = {});
StepResult step(torch::optim::Optimizer& optimizer);

}  // namespace semitone::amp
