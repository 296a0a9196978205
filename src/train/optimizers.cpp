#include "semitone/train/optimizers.h"

#include "semitone/optim/fused_adagrad.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/optim/fused_lamb.h"
#include "semitone/optim/fused_novograd.h"
#include "semitone/optim/fused_sgd.h"
#include "src/train/choices.h"

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <array>

namespace semitone::train {
namespace {

using OptimizerPtr = std::unique_ptr<torch::optim::Optimizer>;
using Parameters = std::vector<at::Tensor>;

template <typename Optimizer, typename Options>
OptimizerPtr make_with_momentum(const Parameters& parameters, const OptimizerSettings& settings) {
  return std::make_unique<Optimizer>(parameters, Options(settings.lr).momentum(settings.momentum));
}

template <typename Optimizer, typename Options>
OptimizerPtr make_with_eps(const Parameters& parameters, const OptimizerSettings& settings) {
  Options options(settings.lr);
  if (settings.eps.has_value()) options.eps(*settings.eps);
  return std::make_unique<Optimizer>(parameters, options);
}

// FusedAdam's default is AdamW.
OptimizerPtr make_fused_adam(const Parameters& parameters, const OptimizerSettings& settings) {
  optim::FusedAdamOptions options(settings.lr);
  if (settings.eps.has_value()) options.eps(*settings.eps);
  return std::make_unique<optim::FusedAdam>(parameters, options.adam_w_mode(false));
}

constexpr std::array kOptimizers{
    OptimizerChoice{"sgd", true, make_with_momentum<torch::optim::SGD, torch::optim::SGDOptions>},
    OptimizerChoice{"adam", false, make_with_eps<torch::optim::Adam, torch::optim::AdamOptions>},
    OptimizerChoice{"adamw", false, make_with_eps<torch::optim::AdamW, torch::optim::AdamWOptions>},
    OptimizerChoice{"fused-sgd", true, make_with_momentum<optim::FusedSGD, optim::FusedSGDOptions>},
    OptimizerChoice{"fused-adam", false, make_fused_adam},
    OptimizerChoice{"fused-adamw", false, make_with_eps<optim::FusedAdam, optim::FusedAdamOptions>},
    OptimizerChoice{"fused-lamb", false, make_with_eps<optim::FusedLAMB, optim::FusedLAMBOptions>},
    OptimizerChoice{"fused-novograd", false,
                    make_with_eps<optim::FusedNovoGrad, optim::FusedNovoGradOptions>},
    OptimizerChoice{"fused-adagrad", false,
                    make_with_eps<optim::FusedAdagrad, optim::FusedAdagradOptions>}};

}  // namespace

std::span<const OptimizerChoice> optimizers() {
  return kOptimizers;
}

const OptimizerChoice& find_optimizer(std::string_view name) {
  return find_choice(optimizers(), name, "train.optimizer");
}

}  // namespace semitone::train
