#pragma once

#include "semitone/optim/fused_optimizer.h"

#include <vector>

namespace semitone::optim {

/// Options of LARC, per group. The defaults are those of Apex's LARC around SGD.
struct LARCOptions : torch::optim::OptimizerCloneableOptions<LARCOptions> {
  LARCOptions(double lr = 1e-3);  // NOLINT(google-explicit-constructor): as torch.optim's

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
  /// The local rate of a tensor (`a` below, before clipping) is this coefficient times |p| / (|g| +
  /// weight_decay |p| + eps). Above 0. Default 0.02.
  TORCH_ARG(double, trust_coefficient) = 0.02;
  /// True: the learning rate is min(local rate, lr) (LARC). False: it is local rate * lr (LARS).
  /// Default true.
  TORCH_ARG(bool, clip) = true;
  /// Added to the denominator of the local rate, at least 0. Default 1e-8.
  TORCH_ARG(double, eps) = 1e-8;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(const double value) override { lr(value); }
};

/// Layer-wise adaptive rate control (You et al. 2017): SGD with a learning rate for each tensor
/// that adapts to its weights and gradients, as Apex's LARC around SGD computes it:
///
///     a = trust_coefficient |p| / (|g| + weight_decay |p| + eps);   clip: a = min(a / lr, 1)
///     g = (g + weight_decay p) · a, then SGD without weight decay
///
/// A tensor with |p| = 0 or |g| = 0 has a = 1 and no decay in that step. A step takes one pass over
/// parameters and gradients for the norms, and one over all tensors. On a device other than the
/// CPU, norms stay there: a step reads nothing back. Apex's LARC wraps an optimizer. This class is an optimizer itself, so learning rate schedulers act on it. State:
/// "momentum_buffer".
class LARC : public FusedOptimizer {
 public:
  explicit LARC(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                const LARCOptions& defaults = {});
  explicit LARC(std::vector<at::Tensor> parameters, const LARCOptions& defaults = {})
      : LARC({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

 private:
  std::string_view component() const override;
  void check(const torch::optim::OptimizerOptions& options) const override;
  std::vector<Slot> slots(const torch::optim::OptimizerOptions& options) const override;
  void update(std::span<Work> work) override;
  Rules rules_of(std::span<const Work> work) const override;
  void measure(std::span<const Work> work, StepOnDevice& step) const override;
};

}  // namespace semitone::optim
