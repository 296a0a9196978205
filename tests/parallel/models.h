#pragma once

#include "tests/support/toy_nets.h"

#include <torch/nn.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <utility>

// Models and data for the tests of data-parallel training, in fp64 by default.
namespace semitone::test {

// The toy net in fp64, with a smooth activation: two trainings differ by the order of their
// additions only.
struct NetImpl : ToyNetImpl {
  explicit NetImpl(bool normalised = false)
      : ToyNetImpl({.normalised = normalised, .activation = at::tanh}) {
    to(torch::kDouble);
  }
};
TORCH_MODULE(Net);

// Two heads on one trunk: a step that uses one of them leaves the other's parameters without a
// gradient. `never` is used by no step.
struct HeadsImpl : torch::nn::Module {
  HeadsImpl() {
    trunk = register_module("trunk", torch::nn::Linear(6, 8));
    left = register_module("left", torch::nn::Linear(8, 3));
    right = register_module("right", torch::nn::Linear(8, 3));
    never = register_module("never", torch::nn::Linear(8, 3));
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& x, bool use_left) {
    const at::Tensor hidden = torch::tanh(trunk->forward(x));
    return use_left ? left->forward(hidden) : right->forward(hidden);
  }
  torch::nn::Linear trunk{nullptr}, left{nullptr}, right{nullptr}, never{nullptr};
};
TORCH_MODULE(Heads);

// The same on every rank, independently of earlier draws.
template <typename Model, typename... Arguments>
Model seeded(std::uint64_t seed, Arguments&&... arguments) {
  torch::manual_seed(seed);
  return Model(std::forward<Arguments>(arguments)...);
}

struct Batch {
  at::Tensor data;
  at::Tensor target;

  // Rows [begin, end).
  Batch rows(std::int64_t begin, std::int64_t end) const {
    return {data.slice(0, begin, end), target.slice(0, begin, end)};
  }
};

inline Batch batch_of(std::int64_t seed, std::int64_t rows) {
  torch::manual_seed(static_cast<std::uint64_t>(seed));
  at::Tensor data = torch::randn({rows, 6}, torch::kDouble);
  at::Tensor target = torch::randn({rows, 3}, torch::kDouble);
  return {data, target};
}

inline at::Tensor sum_of_squares(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).pow(2).sum();
}

// SGD with momentum over this many steps; `step` computes a step's gradients.
inline void train(torch::nn::Module& model, int steps, const std::function<void(int)>& step) {
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int i = 0; i < steps; ++i) {
    optimizer.zero_grad();
    step(i);
    optimizer.step();
  }
}

}  // namespace semitone::test
