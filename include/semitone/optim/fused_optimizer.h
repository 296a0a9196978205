#pragma once

#include "semitone/core/detail/parameter_places.h"

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

/// Optimizers that do a whole step in one pass over memory: unscaling, clipping, the update of an
/// fp32 (master) parameter and of its state, and the rounding into the model's 16-bit parameter.
/// docs/optimizers.md compares them.
namespace semitone::optim {

/// Maps an optimizer's fp32 master weight to the model's 16-bit parameter.
using ModelCopies = std::unordered_map<const c10::TensorImpl*, at::Tensor>;

/// What a step does in addition to the optimizer's update rule.
///
///     optimizer.step(optim::FusedStep().inv_scale(1 / 65536.0).found_inf(flag).copies(&copies));
struct FusedStep {
  using copies_t = const ModelCopies*;
  /// 1 / loss scale. Gradients are multiplied by inv_scale * clip, in fp32, before anything else.
  /// Default 1.
  TORCH_ARG(double, inv_scale) = 1;
  /// The clipping factor, from optim::clip_factor. Default 1.
  TORCH_ARG(double, clip) = 1;
  /// A tensor of one element. If it is not 0, the step changes nothing: no parameter, state or step
  /// count. Undefined: the step is always taken. Default undefined.
  TORCH_ARG(at::Tensor, found_inf);
  /// Maps fp32 masters in the optimizer to the model's 16-bit parameters. Each of these gets its
  /// master's new value, rounded in the same pass. If a master has no gradient, the step reads the
  /// model parameter's gradient in its own dtype, so that no gradient has to be moved or converted
  /// first. Null: none. Default null.
  TORCH_ARG(copies_t, copies) = nullptr;
  /// An additional factor for the gradients that the step reads from model parameters: 1 / loss
  /// scale if those gradients are still scaled, and the masters' own gradients are not. Default 1.
  TORCH_ARG(double, copies_inv_scale) = 1;
};

struct FusedState;

/// The base of all fused optimizers. They are torch::optim::Optimizers: learning rate schedulers,
/// param_groups, torch::save and torch::load work as with LibTorch's own.
///
/// Parameters may be fp32, fp16, bf16 or fp64, dense, with any strides. State is fp32 (fp64 for
/// fp64 parameters, bf16 on request). Arithmetic is fp32, with one rounding into a 16-bit
/// parameter. A gradient's dtype may differ from its parameter's. State below the smallest normal
/// number (2^-126; fp64: 2^-1022) is flushed to 0. On the CPU a step is one vectorised pass over
/// all tensors. On CUDA devices of compute capability 8.0 or newer it is one of Semitone's kernels.
/// fp64, tensors with gaps and other devices use the reference implementation, composed of ATen
/// operators, which is slower. For a CUDA device without Semitone's kernels, a warning is logged
/// once.
///
/// - A parameter without a gradient is not touched: it gets no decay and no state, and its step
///   count does not advance. Bias corrections are per parameter.
/// - A sparse gradient is an Error that names the parameter. This and every other input error of a
///   step is raised before anything is changed.
/// - A parameter that appears in the optimizer twice is updated once.
/// - Parameter groups may be added, and options changed, between any two steps.
/// - Results do not depend on the number of threads. Exception: rules with norms (FusedLAMB,
///   FusedNovoGrad, LARC), for tensors that the reference implementation computes. LibTorch sums
///   their norms, in an order that depends on the threads.
/// - GradScaler and MixedPrecision may let a device decide a step. The functions of this class wait
///   for the outcome if they depend on it. torch::optim::Optimizer::state(), read directly, counts
///   such a step as taken until then.
class FusedOptimizer : public torch::optim::Optimizer,
                       public semitone::detail::UsesParameterPlaces {
 public:
  /// Steps as LibTorch's optimizers do, with a default FusedStep. A closure is evaluated first,
  /// with gradients enabled, and its loss is returned.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Steps with unscaling, clipping, skipping and writing of the model in the same pass.
  /// @return false if found_inf was set: nothing was changed
  bool step(const FusedStep& how);

  /// Adds a group with its own options, or with the defaults if it has none. Do not call this
  /// through a torch::optim::Optimizer&: LibTorch 2.15's function of this name replaces options by
  /// the defaults if it does not know their class. (LibTorch 2.11 keeps them.)
  // NOLINTNEXTLINE(bugprone-derived-method-shadowing-base-method): that is why.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// Sets the index of each parameter in the whole parameter list, for an optimizer that has only
  /// part of that list. The indices seed the random bits of bf16 state. Default: the indices in
  /// this optimizer's own groups.
  void set_parameter_places(semitone::detail::ParameterPlaces places) override;

  /// Returns the number of steps that updated a parameter.
  std::int64_t steps_of(const at::Tensor& parameter) const;

  /// Returns a state tensor by torch.optim's name: "exp_avg", "momentum_buffer" … The result is the
  /// tensor itself, not a copy. Undefined if the parameter has no state yet. Error for a name that
  /// the optimizer does not have.
  at::Tensor state_of(const at::Tensor& parameter, std::string_view name) const;

  /// Returns whether the bf16 parameters of a group have split masters, as
  /// FusedAdamOptions::split_master defines them.
  bool splits_masters(const torch::optim::OptimizerParamGroup& group) const {
    return splits_masters(group.options());
  }
  /// Returns whether a parameter is bf16 and in such a group.
  bool has_split_master(const at::Tensor& parameter) const;

  /// Returns the exact fp32 value of a parameter with a split master; otherwise the parameter
  /// itself.
  at::Tensor master_of(const at::Tensor& parameter) const;

  /// Sets a bf16 parameter and its split master to an fp32 value, for example to the weights before
  /// they were cast. Error if the parameter's group does not split masters.
  void set_master(const at::Tensor& parameter, const at::Tensor& value);

  /// Saves all state, bit for bit, and the options of all groups, in the layout of torch.optim's
  /// C++ archives.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Restores the output of save(), or of the LibTorch optimizer with the same rule (Adam, AdamW,
  /// SGD, Adagrad). Saved options replace the current ones; options that the file lacks keep their
  /// values. LibTorch's files do not say whether they are Adam's or AdamW's, so
  /// FusedAdamOptions::adam_w_mode keeps its value. split_master and bf16_state stay set if they are,
  /// since they say how numbers are stored. State is replaced, except the lower halves of split
  /// masters that the file lacks, which belong to the weights. FileError, with nothing changed, if
  /// the groups or shapes do not match, or for the file of an optimizer with another rule. A file
  /// of SGD has what LARC needs, and the other way round. Error if options are out of range.
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  /// One entry of a parameter's state: a tensor or a number.
  struct Slot {
    std::string_view name;
    bool wanted = true;   ///< whether the options need it
    double initial = 0;   ///< its initial value
    bool number = false;  ///< one fp64 number per parameter, not a tensor of its shape
  };

  /// One parameter of a step. Defined in src/optim/work.h.
  struct Work;
  /// The coefficients of the update rule for several parameters. Defined there too.
  struct Rules;
  /// A step whose coefficients are in the device's memory. Defined there too.
  struct StepOnDevice;

  FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 std::unique_ptr<torch::optim::OptimizerOptions> defaults);

  /// Checks the defaults and the options of all groups. Call it at the end of a constructor.
  void check_options() const;

  /// Updates the parameters that are not on the CPU, with the norms that measure() computes.
  /// Nothing is read from a device. Returns the parameters on the CPU.
  std::vector<Work> update_on_devices(std::span<Work> work) const;

 private:
  friend class CapturableStep;
  friend class DeferredStep;
  struct Deferred;

  /// The component in messages: "optim.fused_adam".
  virtual std::string_view component() const = 0;
  /// Error if the options belong to another optimizer or are out of range.
  virtual void check(const torch::optim::OptimizerOptions& options) const = 0;
  /// The slots, at most three: always the same ones in the same order.
  virtual std::vector<Slot> slots(const torch::optim::OptimizerOptions& options) const = 0;
  /// Returns whether bf16 parameters have split masters.
  virtual bool splits_masters(const torch::optim::OptimizerOptions& /*options*/) const {
    return false;
  }
  /// Returns whether state is bf16, rounded stochastically.
  virtual bool keeps_bf16_state(const torch::optim::OptimizerOptions& /*options*/) const {
    return false;
  }
  /// Called with options that were read from a file: gives them those of the current options that
  /// say how numbers are stored.
  virtual void keep_storage(torch::optim::OptimizerOptions& /*loaded*/,
                            const torch::optim::OptimizerOptions& /*current*/) const {}
  /// Runs the step for parameters whose state exists and whose step count includes this step.
  virtual void update(std::span<Work> work);
  /// Returns the coefficients of each parameter's update, as far as they do not depend on norms.
  virtual Rules rules_of(std::span<const Work> work) const = 0;
  /// Computes, on the device of all these parameters, the coefficients that depend on norms, for a
  /// class that overrides update(). There is at least one parameter.
  virtual void measure(std::span<const Work> work, StepOnDevice& step) const;

  std::vector<Work> gather(const FusedStep& how);
  void count(std::span<Work> work);
  void update_on_device(std::span<Work> work, const at::Tensor& found_inf) const;
  void settle() const;
  void prepare(Work& work, FusedState& state) const;
  void check_state(const FusedState& state, const at::Tensor& parameter,
                   const std::vector<Slot>& slots, const std::string& name) const;
  const FusedState* find(const at::Tensor& parameter) const;
  c10::ScalarType state_dtype(const torch::optim::OptimizerOptions& options,
                              const at::Tensor& parameter) const;

  semitone::detail::ParameterPlaces places_;    // set by set_parameter_places
  mutable std::shared_ptr<Deferred> deferred_;  // a step of which the result is not known yet
};

}  // namespace semitone::optim
