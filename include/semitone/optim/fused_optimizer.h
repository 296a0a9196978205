#pragma once

#include "semitone/core/parameter_places.h"

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
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
/// fp32 (master) parameter, its state, and the rounding into the model's 16-bit parameter.
/// docs/optimizers.md compares them.
namespace semitone::optim {

/// Model parameters in 16 bits, by the fp32 parameter in the optimizer that is their master.
using ModelCopies = std::unordered_map<const c10::TensorImpl*, at::Tensor>;

/// What a step does besides the optimizer's own rule.
///
///     optimizer.step(optim::FusedStep().inv_scale(1 / 65536.0).found_inf(flag).copies(&copies));
struct FusedStep {
  using copies_t = const ModelCopies*;
  /// Gradients are multiplied by inv_scale * clip, in fp32, before anything else: 1/loss scale.
  /// Default 1.
  TORCH_ARG(double, inv_scale) = 1;
  /// The other factor, from optim::clip_factor. Default 1.
  TORCH_ARG(double, clip) = 1;
  /// One element. If it is not 0 the step changes nothing at all: no parameter, state or step
  /// count. Undefined: the step is taken. Default undefined.
  TORCH_ARG(at::Tensor, found_inf);
  /// Where the parameter in the optimizer is an fp32 master: the model's parameter, which gets the
  /// new value rounded in the same pass. If the master has no gradient, the model parameter's is
  /// used, in its own dtype: nothing has to be moved or converted first. Null: none. Default null.
  TORCH_ARG(copies_t, copies) = nullptr;
  /// One more factor for the gradients of model parameters: they are scaled where those of the
  /// masters are not. Default 1.
  TORCH_ARG(double, copies_inv_scale) = 1;
};

/// What a fused optimizer keeps for one parameter.
struct FusedState : torch::optim::OptimizerCloneableParamState<FusedState> {
  std::int64_t step = 0;              ///< steps that this parameter took part in
  std::array<at::Tensor, 3> tensors;  ///< see FusedOptimizer::state_of
  at::Tensor master_low;              ///< split masters: int16, of the parameter's shape

  /// By place, not by name: for what moves state of any optimizer from one parameter to another, as
  /// amp::MasterWeights does. Files are FusedOptimizer::save().
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// The base of all fused optimizers. They are torch::optim::Optimizers: learning rate schedulers,
/// param_groups, torch::save and torch::load work as with LibTorch's own.
///
/// Parameters may be fp32, fp16, bf16 or fp64, dense, in any layout; state is fp32 (fp64 for fp64
/// parameters, bf16 on request). Arithmetic is fp32, with one rounding into a 16-bit parameter.
/// Gradients may have another dtype than their parameter. State below the smallest normal number
/// (2^-126; fp64: 2^-1022) becomes 0. On the CPU a step is one pass in vector code over all tensors
/// at once, on CUDA devices from compute capability 8.0 on a kernel of ours; fp64, tensors with gaps
/// and other devices take the composed operators that define it, which is slower (for a CUDA device
/// without our kernels, a warning says so once).
///
/// - A parameter without a gradient is left alone: no decay, no state, and its own step count (bias
///   corrections are by parameter) does not move.
/// - A sparse gradient is an Error that names the parameter, raised before anything is changed. So
///   is every other bad input of a step.
/// - A parameter that stands in the optimizer twice is stepped once.
/// - Parameter groups may be added, and options changed, between any two steps.
/// - Results do not depend on the number of threads.
class FusedOptimizer : public torch::optim::Optimizer, public UsesParameterPlaces {
 public:
  /// LibTorch's step: a FusedStep with nothing set. With a closure, evaluates it with gradients
  /// enabled first and returns its loss.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// A step with unscaling, clipping, skipping and writing of the model in the same pass.
  /// @return false if found_inf was set: nothing was changed
  bool step(const FusedStep& how);

  /// Adds a group with its own options, or with the defaults if it has none. LibTorch's function of
  /// this name replaces options of classes that it does not know by the defaults (2.15; 2.11 keeps
  /// them): do not call it through a torch::optim::Optimizer&.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// Where the parameters stand in a longer list, of which this optimizer has a part: the random
  /// bits of bf16 state are drawn by these places. Default: the places in this optimizer.
  void set_parameter_places(ParameterPlaces places) override;

  /// Steps that a parameter took part in.
  std::int64_t steps_of(const at::Tensor& parameter) const;

  /// A state tensor by the name that torch.optim gives it: "exp_avg", "momentum_buffer" … It is
  /// the tensor itself, not a copy. Undefined where there is none yet; Error for a name that the
  /// optimizer does not have.
  at::Tensor state_of(const at::Tensor& parameter, std::string_view name) const;

  /// Whether the bf16 parameters of a group have split masters.
  bool splits_masters(const torch::optim::OptimizerParamGroup& group) const {
    return splits_masters(group.options());
  }
  /// Whether a parameter of the optimizer is bf16 and in such a group.
  bool has_split_master(const at::Tensor& parameter) const;

  /// The exact fp32 value of a parameter that has a split master; the parameter itself otherwise.
  at::Tensor master_of(const at::Tensor& parameter) const;

  /// Sets a bf16 parameter and its split master to an fp32 value: weights as they were before they
  /// were cast. Error if the parameter's group does not split masters.
  void set_master(const at::Tensor& parameter, const at::Tensor& value);

  /// All state, bit for bit, and the options of all groups, in the layout of torch.optim's C++
  /// archives.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Restores what save() wrote; also what the LibTorch optimizer of the same rule wrote (Adam,
  /// AdamW, SGD, Adagrad). Options are overwritten by the saved ones, and stay where the file has
  /// none (LibTorch's files do not say whether they are Adam's or AdamW's); state is replaced.
  /// FileError, with nothing changed, if the groups, shapes or names do not fit; Error if options
  /// are out of range.
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  /// One kind of state.
  struct Slot {
    std::string_view name;
    bool wanted = true;   ///< with these options
    double initial = 0;   ///< what it starts as
    bool number = false;  ///< one fp64 number for the parameter, not a tensor of its shape
  };

  /// One parameter of a step, and the numbers of several: src/optim/work.h.
  struct Work;
  struct Rules;

  FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 std::unique_ptr<torch::optim::OptimizerOptions> defaults);

  /// Checks the defaults and the options of all groups. At the end of a constructor.
  void check_options() const;

 private:
  friend class RepeatedStep;

  /// The name in messages: "optim.fused_adam".
  virtual std::string_view where() const = 0;
  /// Error if options are of another optimizer, or out of range.
  virtual void check(const torch::optim::OptimizerOptions& options) const = 0;
  /// At most three, always the same ones in the same order.
  virtual std::vector<Slot> slots(const torch::optim::OptimizerOptions& options) const = 0;
  /// Whether bf16 parameters have split masters.
  virtual bool splits_masters(const torch::optim::OptimizerOptions& /*options*/) const {
    return false;
  }
  /// Whether state is bf16, rounded stochastically.
  virtual bool keeps_bf16_state(const torch::optim::OptimizerOptions& /*options*/) const {
    return false;
  }
  /// The step, for parameters whose state is there and whose step count includes this step.
  virtual void update(std::span<Work> work);
  /// The numbers by which update() changes each parameter, where it does no more than that. Nothing
  /// of a class that overrides update().
  virtual std::optional<Rules> rules_of(std::span<const Work> work) const;

  std::vector<Work> gather(const FusedStep& how);
  void prepare(Work& work, FusedState& state) const;
  void check_state(const FusedState& state, const at::Tensor& parameter,
                   const std::vector<Slot>& slots, const std::string& name) const;
  const FusedState* find(const at::Tensor& parameter) const;
  c10::ScalarType state_dtype(const torch::optim::OptimizerOptions& options,
                              const at::Tensor& parameter) const;

  ParameterPlaces places_;  // that were set
};

}  // namespace semitone::optim
