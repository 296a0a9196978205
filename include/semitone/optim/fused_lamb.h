#pragma once

#include "semitone/optim/fused_optimizer.h"

#include <tuple>
#include <vector>

namespace semitone::optim {

/// Options of FusedLAMB, per group. The defaults are those of Apex's FusedLAMB.
struct FusedLAMBOptions : torch::optim::OptimizerCloneableOptions<FusedLAMBOptions> {
  FusedLAMBOptions(double lr = 1e-3);  // NOLINT(google-explicit-constructor): as torch.optim's

  /// Learning rate, at least 0. Default 1e-3.
  TORCH_ARG(double, lr);
  typedef std::tuple<double, double> betas_t;
  /// Decay rates of the two moments, in [0, 1). Default 0.9, 0.999.
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  /// Added to the denominator, at least 0. Default 1e-6.
  TORCH_ARG(double, eps) = 1e-6;
  /// Weight decay, at least 0. Default 0.01.
  TORCH_ARG(double, weight_decay) = 0.01;
  /// True: the weight decay is part of the update. False: it is added to the gradient (L2). Default
  /// true.
  TORCH_ARG(bool, adam_w_mode) = true;
  /// Divide the moments by 1 - beta^step. Default true.
  TORCH_ARG(bool, bias_correction) = true;
  /// True: the gradient enters the first moment multiplied by 1 - beta1. False: multiplied by 1.
  /// Default true.
  TORCH_ARG(bool, grad_averaging) = true;
  /// Clips gradients so that the norm over all groups is at most this value; 0: no clipping.
  /// Default 1.
  TORCH_ARG(double, max_grad_norm) = 1;
  /// Use the trust ratio also for groups without weight decay. Default false.
  TORCH_ARG(bool, use_nvlamb) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(const double value) override { lr(value); }
};

/// LAMB (You et al. 2020) as Apex computes it: Adam's update u is scaled per tensor so that its
/// norm equals that of the weights.
///
///     g /= max(1, |all g| / max_grad_norm)
///     u = (m / (1 - beta1^t)) / (√(v / (1 - beta2^t)) + eps) + weight_decay p
///     p -= lr · r · u         r = |p| / |u|, and 1 if a norm is 0, or without weight decay
///
/// A step takes one pass over the gradients for the norm (on the CPU only if a group clips), and two
/// over all tensors. Gradients are not modified. Norms are summed in a fixed order, in fp64 (CUDA:
/// in pairs of fp32 numbers); those of fp64 parameters, and of others that the reference
/// implementation computes, by LibTorch, in an order that depends on the number of threads. If no
/// parameter is on the CPU, norms and trust ratios stay on the devices, which send each other the
/// norms of their gradients: a step reads nothing back. With parameters on the CPU beside others, a
/// step reads twice from each device. State: "exp_avg", "exp_avg_sq".
class FusedLAMB : public FusedOptimizer {
 public:
  explicit FusedLAMB(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                     const FusedLAMBOptions& defaults = {});
  explicit FusedLAMB(std::vector<at::Tensor> parameters, const FusedLAMBOptions& defaults = {})
      : FusedLAMB({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

  /// Whether a group clips (max_grad_norm).
  bool combines_gradients() const override;

 private:
  std::string_view component() const override;
  void check(const torch::optim::OptimizerOptions& options) const override;
  std::vector<Slot> slots(const torch::optim::OptimizerOptions& options) const override;
  void update(std::span<Work> work) override;
  Rules rules_of(std::span<const Work> work) const override;
  void measure(std::span<const Work> work, StepOnDevice& step) const override;
  static void measure(StepOnDevice& step, const at::Tensor& grad_norm);
  static at::Tensor grad_norm(std::span<const Work> work, const StepOnDevice& step);
  void update_on_several(std::span<Work> work) const;
};

}  // namespace semitone::optim
