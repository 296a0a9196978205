#pragma once

#include "semitone/amp/initialize.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

// A net with a convolution and a BatchNorm, its images, and one iteration of its training.
namespace semitone::amp::mixed_precision_test {

using test::ToyConvNet;

inline Options quiet(const Options& options) {
  return Options(options).verbosity(0);
}

inline ToyConvNet make_net() {
  torch::manual_seed(5);
  ToyConvNet net;
  const torch::NoGradGuard no_grad;
  net->norm->weight.uniform_(0.5, 1.5);
  net->norm->running_mean.uniform_(-0.1, 0.1);
  return net;
}

inline at::Tensor images() {
  torch::manual_seed(6);
  return torch::randn({4, 2, 5, 5});
}

// Runs one iteration and returns the result of step().
template <typename Model>
Step train_once(MixedPrecision& mixed, Model& model, torch::optim::Optimizer& optimizer,
                const at::Tensor& x) {
  optimizer.zero_grad();
  mixed.scale_loss(mixed.forward(model, x).pow(2).mean(), optimizer).backward();
  return mixed.step(optimizer);
}

}  // namespace semitone::amp::mixed_precision_test
