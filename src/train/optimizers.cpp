#include "src/train/optimizers.h"

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

template <typename Options>
Options options_of(const OptimizerSettings& settings) {
  Options options(settings.lr);
  if constexpr (requires { options.momentum(0.0); }) options.momentum(settings.momentum);
  if constexpr (requires { options.eps(0.0); }) {
    if (settings.eps.has_value()) options.eps(*settings.eps);
  }
  if (settings.weight_decay.has_value()) options.weight_decay(*settings.weight_decay);
  if constexpr (requires { options.split_master(true); })
    options.split_master(settings.split_masters).bf16_state(settings.bf16_state);
  return options;
}

template <typename Optimizer, typename Options>
OptimizerPtr make(const Parameters& parameters, const OptimizerSettings& settings) {
  return std::make_unique<Optimizer>(parameters, options_of<Options>(settings));
}

// FusedAdam's default is AdamW.
OptimizerPtr make_fused_adam(const Parameters& parameters, const OptimizerSettings& settings) {
  return std::make_unique<optim::FusedAdam>(
      parameters, options_of<optim::FusedAdamOptions>(settings).adam_w_mode(false));
}

// FusedAdam decays no weights by default, as Apex's. Without a decay AdamW is Adam, so this has the
// decay of adamw, 1e-2.
OptimizerPtr make_fused_adamw(const Parameters& parameters, const OptimizerSettings& settings) {
  OptimizerSettings decaying = settings;
  if (!decaying.weight_decay.has_value())
    decaying.weight_decay = torch::optim::AdamWOptions().weight_decay();
  return make<optim::FusedAdam, optim::FusedAdamOptions>(parameters, decaying);
}

constexpr std::array kOptimizers{
    OptimizerChoice{"sgd", true, make<torch::optim::SGD, torch::optim::SGDOptions>},
    OptimizerChoice{"adam", false, make<torch::optim::Adam, torch::optim::AdamOptions>},
    OptimizerChoice{"adamw", false, make<torch::optim::AdamW, torch::optim::AdamWOptions>},
    OptimizerChoice{"fused-sgd", true, make<optim::FusedSGD, optim::FusedSGDOptions>},
    OptimizerChoice{"fused-adam", false, make_fused_adam},
    OptimizerChoice{"fused-adamw", false, make_fused_adamw},
    OptimizerChoice{"fused-lamb", false, make<optim::FusedLAMB, optim::FusedLAMBOptions>},
    OptimizerChoice{"fused-novograd", false,
                    make<optim::FusedNovoGrad, optim::FusedNovoGradOptions>},
    OptimizerChoice{"fused-adagrad", false, make<optim::FusedAdagrad, optim::FusedAdagradOptions>}};

}  // namespace

std::span<const OptimizerChoice> optimizers() {
  return kOptimizers;
}

const OptimizerChoice& find_optimizer(std::string_view name) {
  return find_choice(optimizers(), name, "train.optimizer");
}

}  // namespace semitone::train
