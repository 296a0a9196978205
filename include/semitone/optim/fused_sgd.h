#pragma once

#include "semitone/optim/fused_optimizer.h"

#include <vector>

namespace semitone::optim {

/// Options of FusedSGD, per group. The defaults are those of torch.optim.SGD.
struct FusedSGDOptions : torch::optim::OptimizerCloneableOptions<FusedSGDOptions> {
  FusedSGDOptions(double lr = 1e-3);  // NOLINT(google-explicit-constructor): as torch.optim's

  /// Learning rate, at least 0. Default 1e-3.
  TORCH_ARG(double, lr);
  /// Decay of the momentum buffer, at least 0; 0: no buffer. Default 0.
  TORCH_ARG(double, momentum) = 0;
  /// The gradient enters the buffer multiplied by 1 - dampening, except in the first step. Default
  /// 0.
  TORCH_ARG(double, dampening) = 0;
  /// Weight decay, at least 0. Default 0.
  TORCH_ARG(double, weight_decay) = 0;
  /// Nesterov momentum; requires momentum above 0 and dampening 0. Default false.
  TORCH_ARG(bool, nesterov) = false;
  /// Apex's wd_after_momentum: the weight decay does not enter the buffer. Default false.
  TORCH_ARG(bool, wd_after_momentum) = false;
  /// Ascend instead of descend. Default false.
  TORCH_ARG(bool, maximize) = false;
  /// As FusedAdamOptions::split_master. Default false.
  TORCH_ARG(bool, split_master) = false;
  /// As FusedAdamOptions::bf16_state, for the momentum buffer. Default false.
  TORCH_ARG(bool, bf16_state) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(const double value) override { lr(value); }
};

/// Stochastic gradient descent with torch.optim.SGD's formulas, evaluated in its order. The first
/// step that is taken creates the momentum buffer as a copy of the gradient. State:
/// "momentum_buffer".
class FusedSGD : public FusedOptimizer {
 public:
  explicit FusedSGD(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                    const FusedSGDOptions& defaults = {});
  explicit FusedSGD(std::vector<at::Tensor> parameters, const FusedSGDOptions& defaults = {})
      : FusedSGD({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

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
