#pragma once

#include "semitone/optim/fused_adagrad.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/optim/fused_lamb.h"
#include "semitone/optim/fused_novograd.h"
#include "semitone/optim/fused_sgd.h"
#include "semitone/optim/larc.h"

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

// The list of optimizers for all tests of common behaviour.
namespace semitone::test {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

struct Kind {
  std::string name;
  std::string first_state;  // name of a state tensor that has the parameter's shape
  std::function<std::unique_ptr<optim::FusedOptimizer>(const Groups&)> make;
  bool splits_masters = false;

  std::unique_ptr<optim::FusedOptimizer> operator()(std::vector<at::Tensor> parameters) const {
    return make({torch::optim::OptimizerParamGroup(std::move(parameters))});
  }
};

inline void PrintTo(const Kind& kind, std::ostream* out) {
  *out << kind.name;
}

template <typename Optimizer, typename Options>
Kind kind(const std::string& name, const std::string& first_state, const Options& options,
          bool splits_masters = false) {
  return {name, first_state,
          [options](const Groups& groups) { return std::make_unique<Optimizer>(groups, options); },
          splits_masters};
}

inline std::vector<Kind> all_fused_optimizers() {
  using optim::FusedAdagrad;
  using optim::FusedAdagradOptions;
  using optim::FusedAdam;
  using optim::FusedAdamOptions;
  using optim::FusedLAMB;
  using optim::FusedLAMBOptions;
  using optim::FusedNovoGrad;
  using optim::FusedNovoGradOptions;
  using optim::FusedSGD;
  using optim::FusedSGDOptions;
  using optim::LARC;
  using optim::LARCOptions;
  const auto adam = FusedAdamOptions(0.01).weight_decay(0.1);
  const auto sgd = FusedSGDOptions(0.05).weight_decay(0.01);
  return {
      kind<FusedAdam>("adamw", "exp_avg", adam),
      kind<FusedAdam>("adam_amsgrad", "exp_avg",
                      FusedAdamOptions(adam).adam_w_mode(false).amsgrad(true)),
      kind<FusedAdam>("adamw_split", "exp_avg", FusedAdamOptions(adam).split_master(true), true),
      kind<FusedSGD>("sgd", "momentum_buffer", sgd),
      kind<FusedSGD>("sgd_momentum", "momentum_buffer",
                     FusedSGDOptions(sgd).momentum(0.9).nesterov(true)),
      kind<FusedSGD>("sgd_split", "momentum_buffer",
                     FusedSGDOptions(sgd).momentum(0.9).split_master(true), true),
      kind<FusedAdagrad>("adagrad", "sum", FusedAdagradOptions(0.05).weight_decay(0.01)),
      kind<FusedLAMB>("lamb", "exp_avg", FusedLAMBOptions(0.01).max_grad_norm(2)),
      kind<FusedNovoGrad>("novograd", "exp_avg", FusedNovoGradOptions(0.01).weight_decay(0.1)),
      kind<FusedNovoGrad>("novograd_max", "exp_avg",
                          FusedNovoGradOptions(0.01).norm_type(0).reg_inside_moment(true)),
      kind<LARC>("larc", "momentum_buffer", LARCOptions(0.1).momentum(0.9).weight_decay(0.01)),
  };
}

}  // namespace semitone::test
