#pragma once

#include "semitone/amp/initialize.h"
#include "semitone/optim/fused_sgd.h"
#include "tests/support/tensors.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// Common uses of losses, gradients and optimizers in programs for LibTorch and Apex: at every level
// they are right, refused, or cause a warning. What their tests share.
namespace semitone::amp::training_idioms_test {

using c10::ScalarType;
using test::ToyNet;

inline constexpr float kInf = std::numeric_limits<float>::infinity();

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

inline MakeOptimizer sgd(double lr, double momentum = 0) {
  return [=](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                               torch::optim::SGDOptions(lr).momentum(momentum));
  };
}
inline MakeOptimizer fused_sgd(double lr) {
  return [=](std::vector<at::Tensor> parameters) {
    return std::make_unique<optim::FusedSGD>(std::move(parameters), optim::FusedSGDOptions(lr));
  };
}

// Two layers whose forward and backward are computed in 16 bits, and a BatchNorm between them.
inline ToyNet make_net() {
  return ToyNet(test::ToyNetOptions{.inputs = 12, .hidden = 24, .outputs = 4, .normalised = true});
}

struct Training {
  Training(const Options& options, const MakeOptimizer& make) {
    torch::manual_seed(3);
    model = make_net();
    optimizer = make(model->parameters());
    mixed = std::make_unique<MixedPrecision>(
        initialize(model, *optimizer, Options(options).verbosity(0)));
  }
  at::Tensor loss(std::uint64_t seed = 1) {
    torch::manual_seed(100 + seed);
    const at::Tensor x = torch::randn({32, 12});
    return torch::cross_entropy_loss(mixed->forward(model, x), torch::randint(4, {32}));
  }
  void backward(double factor = 1, std::uint64_t seed = 1) {
    mixed->scale_loss(loss(seed) * factor, *optimizer).backward();
  }
  Step step() { return mixed->step(*optimizer); }
  std::vector<at::Tensor> grads() {
    std::vector<at::Tensor> all;
    for (const at::Tensor& parameter : mixed->master_params(*optimizer))
      all.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
    return all;
  }
  std::vector<at::Tensor> masters() { return test::copies(mixed->master_params(*optimizer)); }

  ToyNet model{nullptr};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<MixedPrecision> mixed;
};

inline Options with_scale(const std::string& level, ScalarType dtype) {
  Options options(level);
  options.dtype(dtype);
  if (level != "O0" && dtype == torch::kHalf) options.loss_scale("dynamic");
  return options.loss_scale_options(LossScaleOptions().init_scale(1024));
}

inline Options scaled_by(const std::string& level, ScalarType dtype, const std::string& scale) {
  Options options(level);
  options.dtype(dtype);
  if (level != "O0") options.loss_scale(scale);
  return options.loss_scale_options(LossScaleOptions().init_scale(256));
}

}  // namespace semitone::amp::training_idioms_test
