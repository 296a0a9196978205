#pragma once

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <vector>

namespace semitone::zoo {

// The losses of a model's first steps, each before its step. Every parameter must get a gradient.
// @param loss_of  computes the loss
template <typename Model, typename LossOf>
std::vector<double> losses_of(Model& model, torch::optim::Optimizer& optimizer, int steps,
                              const LossOf& loss_of) {
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = loss_of();
    loss.backward();
    for (const auto& item : model->named_parameters())
      EXPECT_TRUE(item.value().grad().defined()) << item.key();
    optimizer.step();
    losses.push_back(loss.template item<double>());
  }
  return losses;
}

}  // namespace semitone::zoo
