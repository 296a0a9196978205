#pragma once

#include "semitone/amp/autocast.h"
#include "semitone/amp/cast_tree.h"
#include "semitone/amp/grad_scaler.h"
#include "semitone/amp/loss_scaler.h"
#include "semitone/amp/master_weights.h"
#include "semitone/amp/model.h"
#include "semitone/amp/opt_level.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace semitone::amp {

class MixedPrecision;

/// Optimizers given by reference, one or several.
using OptimizerRef = std::reference_wrapper<torch::optim::Optimizer>;
using OptimizerRefs = std::vector<OptimizerRef>;

/// Prepares models and optimizers for an opt level, in place: Apex's amp.initialize.
///
///     auto mixed = amp::initialize(model, optimizer, amp::Options(amp::OptLevel::O2));
///     for (auto& batch : *loader) {
///       optimizer.zero_grad();
///       auto loss = torch::cross_entropy_loss(mixed.forward(model, batch.data), batch.target);
///       mixed.scale_loss(loss, optimizer).backward();
///       mixed.clip_grad_norm_(optimizer, 1.0);
///       mixed.step(optimizer);
///     }
///
/// Call it once, after the models are on their device and the optimizers constructed, before
/// weights are wrapped for data-parallel training. Weights may be loaded before or after.
///
/// Keep what it returns: it is the training. When it is gone, models stay as they were cast, and
/// optimizers have the models' own parameters again, with their state: at O2 they would go on as at
/// O3.
///
/// If it throws, models and optimizers are as before. Error if a floating parameter or buffer is not fp32 (named), if an optimizer cannot work with
/// the level (LBFGS with a loss scale or master weights), if the options contradict each other. The
/// models and optimizers must outlive what is returned; models held by shared pointers are kept
/// alive.
[[nodiscard]] MixedPrecision initialize(const Model& model, torch::optim::Optimizer& optimizer,
                                        const Options& options = {});
[[nodiscard]] MixedPrecision initialize(const std::vector<Model>& models,
                                        const OptimizerRefs& optimizers,
                                        const Options& options = {});
/// For inference, or for optimizers of your own: models only.
[[nodiscard]] MixedPrecision initialize(const Model& model, const Options& options = {});

/// Options of MixedPrecision::scale_loss.
struct ScaleLossOptions {
  /// Which of Options::num_losses scalers to use.
  std::int64_t loss_id = 0;
  /// Leave the gradients scaled: more backward passes with the same scale follow before the one
  /// that is not delayed. Saves one pass over the gradients for each; not needed for gradient
  /// accumulation to be right.
  bool delay_unscale = false;
};

/// A loss times its scale, on its way through backward: what MixedPrecision::scale_loss returns.
///
/// backward() is all that is usually needed. To build on the scaled loss, keep the object, take
/// value(), call torch's backward on what you make of it, and then finish(), which the end of the
/// object does where it was forgotten. An object that ends by an exception, or before anything was
/// back-propagated (with a warning), puts the gradients back as they were; those of earlier passes
/// with delay_unscale are dropped.
///
/// All parameters of the models get their gradients, without the scale, at every level, as from
/// torch's backward; so a GAN zeroes the discriminator's after the generator's loss. Of the
/// optimizers that are named, the next step is skipped if the loss overflows, and moves the scale.
/// Another optimizer skips its next step if it still has the gradients then (they were not zeroed).
///
/// After backward `parameter.grad()` of the model is what the step will read: fp32 where there is a
/// master weight, whatever the parameter's dtype (in 16 bits with a semitone::optim optimizer on
/// the CPU and a scale of 1). Clipping, averaging over ranks and what else is done to it in place,
/// or by another tensor in its place, is done to the step. The next forward() of the model puts it
/// away, until the next backward.
///
/// Between value() and finish() an optimizer can be in one backward only, named or not. Must not
/// outlive its MixedPrecision.
class [[nodiscard]] ScaledLoss {
 public:
  ScaledLoss(ScaledLoss&& other) noexcept;
  ScaledLoss& operator=(ScaledLoss&&) = delete;
  ~ScaledLoss();

  /// loss * scale, in fp32 (fp64 for an fp64 loss). Not of a temporary: it would be gone, and the
  /// gradients scaled for good, before a backward of yours is over.
  ///
  ///     auto scaled = mixed.scale_loss(loss, optimizer);
  ///     (scaled.value() + penalty).backward();
  ///     scaled.finish();
  const at::Tensor& value() &;
  const at::Tensor& value() && = delete;  // keep the ScaledLoss, or call its backward()

  /// Back-propagates and finishes. If backward throws, the gradients are as before and the
  /// exception goes on. Once: Error at a second call.
  /// @param gradient  for a loss that is no scalar, as in torch::Tensor::backward
  void backward(const at::Tensor& gradient = {}, bool retain_graph = false,
                bool create_graph = false);

  /// Takes the scale out of the gradients (into the master weights' where there are some), adds
  /// earlier ones, looks for inf and NaN. Once.
  void finish();

 private:
  friend class MixedPrecision;
  struct Work;
  explicit ScaledLoss(at::Tensor scaled, std::unique_ptr<Work> work);
  void require_unfinished() const;
  void cancel() noexcept;

  at::Tensor scaled_;
  std::unique_ptr<Work> work_;  // null where there is nothing to do, or no more
  bool finished_ = false;
};

/// What amp::initialize returns: the state of mixed-precision training. Several can live side by
/// side; each knows only its own models and optimizers. Movable; use it from one thread at a time.
class [[nodiscard]] MixedPrecision {
 public:
  MixedPrecision(MixedPrecision&&) noexcept;
  MixedPrecision& operator=(MixedPrecision&&) noexcept;
  ~MixedPrecision();

  const Properties& properties() const;

  /// Runs model->forward(arguments...) as the level wants it: floating arguments (nested ones too,
  /// see map_tensors) are cast to cast_model_type, operators run under the policy at O1, results
  /// are cast to cast_model_outputs. fp64 tensors are left alone.
  ///
  /// A model that is trained without it runs in fp32 at O1, and at O2 only with arguments in 16 bits:
  /// step() warns of that, once for each model.
  /// @param model  one of the initialized ones, or a module inside one (`model->decoder`): a module
  /// holder, shared pointer, AnyModule or reference, or a torch::jit::Module, which takes IValues, or
  /// what becomes one, or a std::vector<IValue> of all inputs, with or without torch::jit::Kwargs, and
  /// returns an IValue; or what wraps one of them and has a forward() of its own, such as
  /// parallel::DistributedDataParallel. Error for another one, and for one that was moved to another
  /// device since.
  /// @param arguments  as in a call of a function template: braces have no type, so that `{}` for "no
  /// mask" has to be written torch::Tensor()
  template <typename M, typename... Arguments>
  auto forward(M& model, Arguments&&... arguments) {
    const auto region = enter(handle_of(model));
    const auto cast = [this](const auto& leaf) { return cast_input(leaf); };
    const auto uncast = [this](const auto& leaf) { return cast_output(leaf); };
    if constexpr (std::is_same_v<std::remove_const_t<M>, torch::jit::Module>) {
      return cast_output(
          run_script(model, map_tensors(std::forward<Arguments>(arguments), cast)...));
    } else if constexpr (requires {
                           model.forward(map_tensors(std::forward<Arguments>(arguments), cast)...);
                         }) {
      return map_tensors(model.forward(map_tensors(std::forward<Arguments>(arguments), cast)...),
                         uncast);
    } else {
      return map_tensors(model->forward(map_tensors(std::forward<Arguments>(arguments), cast)...),
                         uncast);
    }
  }

  /// Runs any other code of the models as forward() runs forward(): returns function(arguments...)
  /// with the arguments cast, inside the region, and with its results cast.
  ///
  ///     auto image = mixed.call([&](const at::Tensor& z) { return vae->decode(z); }, latent);
  template <typename Function, typename... Arguments>
  auto call(Function&& function, Arguments&&... arguments) {
    const auto region = enter_any();
    const auto cast = [this](const auto& leaf) { return cast_input(leaf); };
    const auto uncast = [this](const auto& leaf) { return cast_output(leaf); };
    if constexpr (std::is_void_v<decltype(std::invoke(
                      function, map_tensors(std::forward<Arguments>(arguments), cast)...))>) {
      std::invoke(function, map_tensors(std::forward<Arguments>(arguments), cast)...);
    } else {
      return map_tensors(
          std::invoke(function, map_tensors(std::forward<Arguments>(arguments), cast)...), uncast);
    }
  }

  /// The region that forward runs in, for losses and for methods of the models other than forward.
  /// At O1 it casts as the policy says. At O2 and O3 nothing is cast but fp32 that meets 16-bit
  /// weights in a product or a recurrent network, which LibTorch refuses: it is lowered. What comes
  /// out is in the dtype that it was computed in. At O0 nothing is changed.
  Autocast autocast() const;

  /// See ScaledLoss. Error for an unknown optimizer or loss_id.
  /// @param optimizers  those whose parameters are to get gradients from this loss; at least one
  ScaledLoss scale_loss(const at::Tensor& loss, torch::optim::Optimizer& optimizer,
                        ScaleLossOptions options = {});
  ScaledLoss scale_loss(const at::Tensor& loss, const OptimizerRefs& optimizers,
                        ScaleLossOptions options = {});

  /// Steps the optimizer and writes the master weights into the model, or skips: if a loss that was
  /// scaled for this optimizer since its last step overflowed — with it, every other optimizer
  /// named for that loss skips its next step. Moves the scales of those losses, once however many
  /// backward passes were accumulated. One host read. The masters' gradients are dropped.
  ///
  /// Gradients are looked at where they pass through an unscale: always but with a loss scale of 1
  /// and no master weights, which is plain training. Error while gradients are scaled: before
  /// finish(), or after delay_unscale. DivergedError: see LossScaleOptions::max_consecutive_skips;
  /// the step counts as skipped then.
  Step step(torch::optim::Optimizer& optimizer);

  /// The parameters that the optimizer updates: master weights, and fp32 parameters. What to clip,
  /// after backward, but with clip_grad_norm_ cheaper.
  std::vector<at::Tensor> master_params(torch::optim::Optimizer& optimizer) const;

  /// Clips the norm of master_params' gradients, after backward and before step(), and returns the
  /// norm that they had: optim::clip_grad_norm_, but gradients that step() takes from the model in
  /// 16 bits (a semitone::optim optimizer at O2, on a CPU) stay there, and are multiplied by the
  /// factor in the step. Where the norm is not finite nothing is clipped: such a step is skipped,
  /// unless it is plain training, where nobody looks. Error while gradients are scaled, as step();
  /// for a norm_type that is not above 0, or a negative max_norm.
  /// @param norm_type  order of the norm; infinity: the largest magnitude
  /// @param error_if_nonfinite  Error if the norm is inf or NaN, before anything is changed
  double clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                         double norm_type = 2.0, bool error_if_nonfinite = false);

  /// Drops the gradients of the optimizer's parameters and their masters, and forgets what was
  /// found in them. After a step, optimizer.zero_grad() and model->zero_grad() do as well: nothing
  /// is left on the other side. To discard a backward pass without a step takes this one.
  void zero_grad(torch::optim::Optimizer& optimizer);

  /// The scaler of a loss.
  const LossScaler& loss_scaler(std::int64_t loss_id = 0) const;
  /// Steps skipped so far, of all optimizers.
  std::int64_t skipped_steps() const;

  /// While it lives, the model's parameters and buffers are fp32: the exact master weights where
  /// there are some. For saving, loading, exporting and averaging: saved weights are fp32 at every
  /// level, and what is changed or loaded meanwhile is what training goes on with. No forward or
  /// step in the meantime.
  ///
  ///     { const auto fp32 = mixed.fp32_weights(model); torch::save(model, "model.pt"); }
  class [[nodiscard]] Fp32Weights {
   public:
    ~Fp32Weights();
    Fp32Weights(Fp32Weights&&) noexcept;
    Fp32Weights& operator=(Fp32Weights&&) = delete;
    /// What the destructor does, with exceptions: casts back. Error if a tensor has another shape
    /// now; it is then as before, the others are taken over. (The destructor writes that to the
    /// log.)
    void end();

   private:
    friend class MixedPrecision;
    struct Saved;
    explicit Fp32Weights(std::unique_ptr<Saved> saved);
    std::unique_ptr<Saved> saved_;
  };
  Fp32Weights fp32_weights(const Model& model);

  /// torch::save and torch::load of a model inside fp32_weights() (a TorchScript one: its own
  /// format). The file appears whole or not at all, and can be loaded whatever floating dtypes it
  /// holds. FileError if it cannot be written, or read, or does not fit the model, which is then as
  /// it was.
  ///
  /// torch::load outside of it works as well: LibTorch 2.11 leaves the bytes of an fp32 file in a
  /// 16-bit tensor, which the next forward, autocast, scale_loss, step or save finds and takes over.
  /// (Error where other tensors hold the memory that was loaded, too, such as an InputArchive that is
  /// still there.) torch::save outside of it writes 16 bits, which an fp32 model cannot load.
  void save_model(const Model& model, const std::string& path);
  void load_model(const Model& model, const std::string& path);

  /// Loss scalers and master weights: with the model's and the optimizer's own state, all that a
  /// resumed run needs to go on bit for bit. Save models inside fp32_weights(); load the three in
  /// any order, before or after the first step.
  ///
  /// save() is an Error with gradients under way (between scale_loss and step). load() drops
  /// gradients; it is a FileError, and changes nothing, unless level, dtype, the shapes of the
  /// masters and the numbers of models, optimizers and losses are the saved run's.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

  /// As GradScaler::set_found_inf_hook: lets ranks agree on found_inf. Called by step(), for each
  /// loss of the optimizer in the order of their first backward; not in plain training, where
  /// nothing is looked at. Under DistributedDataParallel no hook is needed: an inf on one rank is in
  /// everybody's mean.
  void set_found_inf_hook(FoundInfHook hook);

  /// The implementation.
  struct Impl;

 private:
  friend MixedPrecision initialize(const std::vector<Model>&, const OptimizerRefs&, const Options&);
  friend class CapturedStep;
  explicit MixedPrecision(std::unique_ptr<Impl> impl);

  // What forward needs: the model as the key it is known by, and the region.
  static const void* handle_of(const torch::nn::Module& module) { return &module; }
  static const void* handle_of(const torch::jit::Module& module) { return module._ivalue().get(); }
  template <typename Held>
  static auto handle_of(const Held& held) -> decltype(handle_of(*held)) {
    return handle_of(*held);
  }
  static const void* handle_of(const torch::nn::AnyModule& module) { return module.ptr().get(); }
  // The inputs of a script as LibTorch takes them, or one by one.
  template <typename... Inputs>
  static c10::IValue run_script(torch::jit::Module& script, Inputs&&... inputs) {
    constexpr bool is_list =
        std::is_same_v<std::tuple<std::decay_t<Inputs>...>, std::tuple<std::vector<c10::IValue>>> ||
        std::is_same_v<std::tuple<std::decay_t<Inputs>...>,
                       std::tuple<std::vector<c10::IValue>, torch::jit::Kwargs>>;
    if constexpr (is_list) {
      return script.forward(std::forward<Inputs>(inputs)...);
    } else {
      return script.forward({c10::IValue(std::forward<Inputs>(inputs))...});
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

}  // namespace semitone::amp
