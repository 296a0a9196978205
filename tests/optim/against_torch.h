#pragma once

#include "semitone/optim/fused_optimizer.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// A fused optimizer beside LibTorch's.
namespace semitone::test {

// How far two fp32 trajectories may be apart after `steps` steps: each rounds a few operations
// differently (products fused into additions), which is some units of the last place of the parameter
// and of the update, every step.
inline void expect_same_trajectory(const at::Tensor& got, const at::Tensor& want, double update,
                                   int steps) {
  const at::Tensor g = got.detach().to(at::kDouble);
  const at::Tensor w = want.detach().to(at::kDouble);
  constexpr double kUnit = 1.1920929e-07;
  const at::Tensor near = (g - w).abs() <= steps * kUnit * (0.5 * w.abs() + 4 * update);
  EXPECT_TRUE(near.all().item<bool>())
      << "the largest difference is " << (g - w).abs().max().item<double>();
}

struct Pair {
  std::unique_ptr<optim::FusedOptimizer> ours;
  std::unique_ptr<torch::optim::Optimizer> theirs;
};

// Takes `steps` steps with both over the same random values and gradients. make(parameters of ours,
// parameters of theirs) gives the pair; update is the size of a step.
template <typename Make>
void expect_as_torch(const Make& make, double update, int steps = 20) {
  using Shape = std::vector<std::int64_t>;
  torch::manual_seed(11);
  std::vector<at::Tensor> ours;
  std::vector<at::Tensor> theirs;
  for (const Shape& shape : std::vector<Shape>{{1000}, {}, {17, 3}, {40, 1, 9}}) {
    ours.push_back(torch::randn(shape).requires_grad_());
    theirs.push_back(ours.back().detach().clone().requires_grad_());
  }
  const Pair pair = make(ours, theirs);
  for (int step = 1; step <= steps; ++step) {
    for (std::size_t i = 0; i < ours.size(); ++i) {
      if (step % 3 == 0 && i == 2) {  // none in some steps
        ours[i].mutable_grad().reset();
        theirs[i].mutable_grad().reset();
        continue;
      }
      ours[i].mutable_grad() = torch::randn(ours[i].sizes());
      theirs[i].mutable_grad() = ours[i].grad();
    }
    pair.ours->step();
    pair.theirs->step();
    for (std::size_t i = 0; i < ours.size(); ++i) {
      SCOPED_TRACE("step " + std::to_string(step) + ", parameter " + std::to_string(i));
      expect_same_trajectory(ours[i], theirs[i], update, step);
    }
  }
}

}  // namespace semitone::test
