#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

// The optimizers that `semitone train --optimizer` offers.
namespace semitone::train {

// The settings that a training gives to its optimizer. All others have the optimizer's defaults.
struct OptimizerSettings {
  double lr = 0;
  // Ignored by an optimizer without has_momentum.
  double momentum = 0;
  // Of Adam and its relatives. Not set: the optimizer's default.
  std::optional<double> eps = std::nullopt;
  // Not set: the optimizer's default; of fused-adamw that of adamw, 1e-2.
  std::optional<double> weight_decay = std::nullopt;
  // Of fused-sgd, fused-adam and fused-adamw; see their options split_master and bf16_state.
  bool split_masters = false;
  bool bf16_state = false;
};

// An optimizer by its name.
struct OptimizerChoice {
  std::string_view name;
  bool has_momentum;
  std::unique_ptr<torch::optim::Optimizer> (*make)(const std::vector<at::Tensor>& parameters,
                                                   const OptimizerSettings& settings);
};

// LibTorch's sgd, adam and adamw; of Semitone's, fused-sgd, fused-adam, fused-adamw, fused-lamb,
// fused-novograd and fused-adagrad.
std::span<const OptimizerChoice> optimizers();

// Error for a name that no optimizer has.
const OptimizerChoice& find_optimizer(std::string_view name);

}  // namespace semitone::train
