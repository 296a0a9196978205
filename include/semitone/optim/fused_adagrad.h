#pragma once

#include "semitone/optim/fused_optimizer.h"

#include <vector>

namespace semitone::optim {

/// Options of FusedAdagrad, per group. The defaults are those of torch.optim.Adagrad and Apex.
struct FusedAdagradOptions : torch::optim::OptimizerCloneableOptions<FusedAdagradOptions> {
  FusedAdagradOptions(double lr = 1e-2);  // NOLINT(google-explicit-constructor): as torch.optim's

  /// Learning rate, at least 0. Default 1e-2.
  TORCH_ARG(double, lr);
  /// Decay of the learning rate: step t uses lr / (1 + (t - 1) lr_decay). At least 0. Default 0.
  TORCH_ARG(double, lr_decay) = 0;
  /// Weight decay, at least 0. Default 0.
  TORCH_ARG(double, weight_decay) = 0;
  /// Initial value of the sum of squares, at least 0. It is read per group, whereas torch.optim's
  /// C++ Adagrad reads it from the defaults only. Default 0.
  TORCH_ARG(double, initial_accumulator_value) = 0;
  /// Added to the denominator, at least 0. Default 1e-10.
  TORCH_ARG(double, eps) = 1e-10;
  /// True: the weight decay is part of the update. False: it is added to the gradient (L2). Default
  /// false.
  TORCH_ARG(bool, adagrad_w_mode) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(const double value) override { lr(value); }
};

/// Adagrad (Duchi et al. 2011) with the formulas of torch.optim.Adagrad:
///
///     h += g²         p -= lr · g / (√h + eps)
///
/// State: "sum".
class FusedAdagrad : public FusedOptimizer {
 public:
  explicit FusedAdagrad(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                        const FusedAdagradOptions& defaults = {});
  explicit FusedAdagrad(std::vector<at::Tensor> parameters,
                        const FusedAdagradOptions& defaults = {})
      : FusedAdagrad({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

 private:
  std::string_view component() const override;
  void check(const torch::optim::OptimizerOptions& options) const override;
  std::vector<Slot> slots(const torch::optim::OptimizerOptions& options) const override;
  Rules rules_of(std::span<const Work> work) const override;
};

}  // namespace semitone::optim
