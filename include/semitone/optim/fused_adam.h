#pragma once

#include "semitone/optim/fused_optimizer.h"

#include <tuple>
#include <vector>

namespace semitone::optim {

/// Options of FusedAdam, per group. The defaults are those of Apex's FusedAdam.
struct FusedAdamOptions : torch::optim::OptimizerCloneableOptions<FusedAdamOptions> {
  FusedAdamOptions(double lr = 1e-3);  // NOLINT(google-explicit-constructor): as torch.optim's

  /// Learning rate, at least 0. Default 1e-3.
  TORCH_ARG(double, lr);
  typedef std::tuple<double, double> betas_t;
  /// Decay rates of the two moments, in [0, 1). Default 0.9, 0.999.
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  /// Added to the denominator, at least 0. Default 1e-8.
  TORCH_ARG(double, eps) = 1e-8;
  /// Weight decay, at least 0. Default 0.
  TORCH_ARG(double, weight_decay) = 0;
  /// True: AdamW, with decoupled weight decay (p *= 1 - lr * weight_decay). False: Adam, with
  /// weight decay added to the gradient (L2). Default true.
  TORCH_ARG(bool, adam_w_mode) = true;
  /// Divide the moments by 1 - beta^step. Default true.
  TORCH_ARG(bool, bias_correction) = true;
  /// Divide by the largest second moment so far. Default false.
  TORCH_ARG(bool, amsgrad) = false;
  /// Ascend instead of descend. Default false.
  TORCH_ARG(bool, maximize) = false;
  /// For bf16 parameters: keep fp32 master weights without a second full copy. The parameter is the
  /// master's upper half (the master rounded to nearest, ties away from zero), and the state holds
  /// the lower 16 bits. This takes 4 bytes per weight instead of 6, and the masters are bit for bit
  /// those of training with fp32 master weights. fp32 and fp64 parameters need no master; fp16
  /// parameters are an Error. Default false.
  TORCH_ARG(bool, split_master) = false;
  /// Keep the moments in bf16: 4 bytes per weight instead of 8. (fp64 parameters keep fp64
  /// moments.) Arithmetic stays fp32, and the stored moments are rounded stochastically (Gupta et
  /// al. 2015). With rounding to nearest, exp_avg_sq would stop as soon as a step moves it by less
  /// than half a unit in the last place (1/512 to 1/256 of its value), which happens early with the
  /// default betas. max_exp_avg_sq is rounded to nearest. As a maximum of noisy numbers it grows
  /// further than in fp32. The random bits are a hash of the parameter's place in the optimizer,
  /// its shape, its step and the element's position in memory. They are therefore the same in every
  /// run, on every rank, in a ZeroRedundancyOptimizer and after loading. Default false.
  TORCH_ARG(bool, bf16_state) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(const double value) override { lr(value); }
};

/// Adam and AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019), with torch.optim's formulas,
/// evaluated in its order:
///
///     m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g²
///     p -= lr / (1 - beta1^t) · m / (√v / √(1 - beta2^t) + eps)
///
/// fp32 results differ from torch::optim::AdamW's by a few units in the last place, since AdamW
/// fuses some multiplications and additions. State: "exp_avg", "exp_avg_sq" and, for amsgrad,
/// "max_exp_avg_sq".
///
///     optim::FusedAdam optimizer(model->parameters(),
///                                optim::FusedAdamOptions(3e-4).weight_decay(0.1));
class FusedAdam : public FusedOptimizer {
 public:
  explicit FusedAdam(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                     const FusedAdamOptions& defaults = {});
  explicit FusedAdam(std::vector<at::Tensor> parameters, const FusedAdamOptions& defaults = {})
      : FusedAdam({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

 private:
  std::string_view component() const override;
  void check(const torch::optim::OptimizerOptions& options) const override;
  std::vector<Slot> slots(const torch::optim::OptimizerOptions& options) const override;
  bool splits_masters(const torch::optim::OptimizerOptions& options) const override;
  bool keeps_bf16_state(const torch::optim::OptimizerOptions& options) const override;
  void keep_storage(torch::optim::OptimizerOptions& loaded,
                    const torch::optim::OptimizerOptions& current) const override;
  Rules rules_of(std::span<const Work> work) const override;
};

}  // namespace semitone::optim
