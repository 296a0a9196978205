#pragma once

#include "semitone/optim/fused_optimizer.h"

#include <cstdint>
#include <tuple>
#include <vector>

namespace semitone::optim {

/// Options of FusedNovoGrad, per group. The defaults are those of Apex's FusedNovoGrad.
struct FusedNovoGradOptions : torch::optim::OptimizerCloneableOptions<FusedNovoGradOptions> {
  FusedNovoGradOptions(double lr = 1e-3);  // NOLINT(google-explicit-constructor): as torch.optim's

  /// Learning rate, at least 0. Default 1e-3.
  TORCH_ARG(double, lr);
  typedef std::tuple<double, double> betas_t;
  /// Decay rates of the moment and of the norm, in [0, 1). Default 0.9, 0.999.
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  /// Added to the denominator, at least 0. Default 1e-8.
  TORCH_ARG(double, eps) = 1e-8;
  /// Weight decay, at least 0. Default 0.
  TORCH_ARG(double, weight_decay) = 0;
  /// Divide by 1 - beta^step. Default true.
  TORCH_ARG(bool, bias_correction) = true;
  /// True: the gradient enters the moment multiplied by 1 - beta1. False: multiplied by 1. Default
  /// true.
  TORCH_ARG(bool, grad_averaging) = true;
  /// True: the weight decay enters the moment. False: it enters the update. Default false.
  TORCH_ARG(bool, reg_inside_moment) = false;
  /// 2: Euclidean norm of a gradient; 0: its largest magnitude. Default 2.
  TORCH_ARG(std::int64_t, norm_type) = 2;
  /// True: the running norm starts at 0. False: it starts at the first norm. Default false.
  TORCH_ARG(bool, init_zero) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(const double value) override { lr(value); }
};

/// NovoGrad (Ginsburg et al. 2019) as Apex computes it. The second moment is one number n per
/// tensor, a running norm of its gradient.
///
///     n = √(beta2 n² + (1 - beta2) |g|²)         norm_type 0: n = beta2 n + (1 - beta2) max|g|
///     d = n / √(1 - beta2^t) + eps
///     m = beta1 m + (1 - beta1) g
///     p -= lr · (m / (1 - beta1^t) / d + weight_decay p)
///
/// With reg_inside_moment, g / d + weight_decay p replaces g in the formula of m, and the update is
/// p -= lr · m / (1 - beta1^t).
///
/// A step takes one pass over the gradients for the norms, and one over all tensors. On a device
/// other than the CPU, norms stay there: a step reads nothing back.
/// State: "exp_avg" and "grad_norm", one fp64 number on the parameter's device.
class FusedNovoGrad : public FusedOptimizer {
 public:
  explicit FusedNovoGrad(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                         const FusedNovoGradOptions& defaults = {});
  explicit FusedNovoGrad(std::vector<at::Tensor> parameters,
                         const FusedNovoGradOptions& defaults = {})
      : FusedNovoGrad({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

 private:
  std::string_view component() const override;
  void check(const torch::optim::OptimizerOptions& options) const override;
  std::vector<Slot> slots(const torch::optim::OptimizerOptions& options) const override;
  void update(std::span<Work> work) override;
  Rules rules_of(std::span<const Work> work) const override;
  void measure(std::span<const Work> work, StepOnDevice& step) const override;
};

}  // namespace semitone::optim
