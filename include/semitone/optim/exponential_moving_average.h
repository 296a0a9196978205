#pragma once

#include <torch/arg.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>

namespace torch::jit {
struct Module;
}  // namespace torch::jit

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace semitone::optim {

/// Options of ExponentialMovingAverage.
struct ExponentialMovingAverageOptions {
  /// @param decay  as below
  ExponentialMovingAverageOptions(double decay = 0.999)  // NOLINT(google-explicit-constructor)
      : decay_(decay) {}
  /// Share of the average that an update keeps, in [0, 1]. Default 0.999, that of
  /// torch.optim.swa_utils.get_ema_multi_avg_fn.
  TORCH_ARG(double, decay);
  /// Whether the decay rises to its value: after n updates it is min(decay, (1 + n) / (10 + n)), as
  /// in TensorFlow's ExponentialMovingAverage. The weights of the first steps are then forgotten
  /// soon.
  TORCH_ARG(bool, warmup) = false;
  /// Whether floating-point buffers are averaged too, such as the running statistics of BatchNorm.
  /// Other buffers are then those of the last update. False: evaluation uses the buffers that the
  /// model has at that time. Default false, as in torch.optim.swa_utils.AveragedModel.
  TORCH_ARG(bool, use_buffers) = false;
};

/// The exponential moving average (EMA) of a model's weights, with which a model is often
/// evaluated:
///
///     optim::ExponentialMovingAverage ema(*model, 0.9999);
///     for (auto& batch : loader) {
///       …
///       if (mixed.step(optimizer) == amp::Step::stepped) ema.update();
///     }
///     {
///       const auto averaged = ema.apply();
///       test(model, *test_loader);                    // with the averaged weights
///       mixed.save_model(model, "averaged.pt");
///     }                                               // the training's weights are back
///
/// An update computes average += (1 - decay) * (weight - average) with at::lerp. The first update
/// copies the weights, as in torch.optim.swa_utils.AveragedModel, so that weights that were loaded
/// before it count and those of the initialisation do not.
///
/// Averages are fp32, also of 16-bit weights; fp64 and complex weights are averaged in their own
/// dtype. If amp::initialize has given a 16-bit parameter a master weight, the master is averaged:
/// in 16 bits most updates would be lost. A parameter that appears in the model several times is
/// averaged once. Averages are on the devices of the weights, and nothing is read from these.
///
/// All ranks of a data-parallel training have the same parameters, so they get the same averages of
/// them without communication. BatchNorm's running statistics are each rank's own, and so are
/// their averages with use_buffers: let rank 0 evaluate, or use SyncBatchNorm.
///
/// The object keeps the model's tensors, not the model. Parameters that are registered later are
/// not averaged. Movable. Use it and the model from one thread at a time.
class ExponentialMovingAverage {
 public:
  /// Error for a decay outside [0, 1], and for a model without parameters. Reads no weights.
  explicit ExponentialMovingAverage(const torch::nn::Module& model,
                                    const ExponentialMovingAverageOptions& options = {});
  /// The same for a TorchScript module.
  explicit ExponentialMovingAverage(const torch::jit::Module& model,
                                    const ExponentialMovingAverageOptions& options = {});
  ExponentialMovingAverage(ExponentialMovingAverage&&) noexcept;
  ExponentialMovingAverage& operator=(ExponentialMovingAverage&&) noexcept;
  ~ExponentialMovingAverage();

  /// Adds the model's weights to the average. Call it after each step of the optimizer. (After a
  /// skipped step, the weights are those of the step before: an update would count them twice.)
  ///
  /// Takes one pass over weights and averages, and no copies, except of 16-bit weights without a
  /// master, of split masters, and of the first weights. Error, with nothing changed, while apply()
  /// lasts, or if the shape of a weight has changed.
  void update();

  /// Returns the number of updates.
  std::int64_t updates() const;

  /// While this object exists, the model has the averaged weights.
  class [[nodiscard]] Applied {
   public:
    Applied(Applied&&) noexcept;
    Applied& operator=(Applied&&) = delete;
    ~Applied();
    /// Gives the model its own weights back, as the destructor does, but reports errors. (The
    /// destructor logs them.) If a weight cannot be set, all others are, and the first error is
    /// thrown. The call can then be repeated, such as when the weight has its shape again.
    void end();

   private:
    friend class ExponentialMovingAverage;
    struct Saved;
    explicit Applied(std::unique_ptr<Saved> saved);
    std::unique_ptr<Saved> saved_;
  };

  /// Gives the model the averaged weights until the result is destroyed. The model then has its own
  /// weights back, bit for bit, also if an exception has left the scope. Both the 16-bit weights
  /// and their masters are replaced, so evaluation, save_model and fp32_weights see the average, at
  /// every opt level. Before the first update nothing changes.
  ///
  /// Needs memory for a copy of the weights, with masters instead of the weights that have one. Do
  /// not train in the meantime: changes of the weights are lost at the end. Do not save the
  /// training's checkpoint either: it would have the averages in place of the weights. Error, with
  /// nothing changed, in the cases of update().
  Applied apply();

  /// Saves and loads the averages and the number of updates, bit for bit. The decay is not saved.
  /// FileError, with nothing changed, if names or shapes do not match. Error while apply() lasts.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  struct Impl;
  // Error for an object that was moved from.
  Impl& impl() const;
  std::shared_ptr<Impl> impl_;  // Applied has it too
};

}  // namespace semitone::optim
