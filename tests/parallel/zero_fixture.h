#pragma once

#include "semitone/optim/fused_adam.h"
#include "semitone/parallel/zero_redundancy_optimizer.h"
#include "tests/parallel/models.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// Optimizers to shard, and trainings of the toy net by them.
namespace semitone::parallel::zero_test {

using test::Batch;
using test::batch_of;
using test::Net;
using test::seeded;
using test::sum_of_squares;
using Factory = ZeroRedundancyOptimizer::Factory;
using ParamGroups = ZeroRedundancyOptimizer::ParamGroups;

template <typename Optimizer, typename Options>
Factory factory(const Options& options) {
  return
      [options](const ParamGroups& groups) { return std::make_unique<Optimizer>(groups, options); };
}

struct Kind {
  std::string name;
  Factory make;
};

inline std::vector<Kind> all_kinds() {
  namespace torch_optim = torch::optim;
  return {
      {"SGD",
       factory<torch_optim::SGD>(torch_optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01))},
      {"Adam", factory<torch_optim::Adam>(torch_optim::AdamOptions(0.01).amsgrad(true))},
      {"AdamW", factory<torch_optim::AdamW>(torch_optim::AdamWOptions(0.01).weight_decay(0.1))},
      {"FusedAdam", factory<optim::FusedAdam>(optim::FusedAdamOptions(0.01).weight_decay(0.1))},
      {"FusedAdam, state in bf16",
       factory<optim::FusedAdam>(optim::FusedAdamOptions(0.01).bf16_state(true))},
      // Makes its state in the constructor.
      {"Adagrad", factory<torch_optim::Adagrad>(
                      torch_optim::AdagradOptions(0.01).initial_accumulator_value(0.1))},
  };
}

inline Factory adam() {
  return all_kinds().at(1).make;
}

inline std::unique_ptr<torch::optim::Optimizer> unsharded(
    const Factory& make, const std::vector<at::Tensor>& parameters) {
  return make({torch::optim::OptimizerParamGroup(parameters)});
}

// The gradients of a step, the same on every rank.
inline void back_propagate(Net& model, int step) {
  const Batch batch = batch_of(100 + step, 8);
  sum_of_squares(model->forward(batch.data), batch.target).backward();
}

// Steps [begin, end) of a run, with a decreasing learning rate.
inline void train(Net& model, torch::optim::Optimizer& optimizer, int begin, int end) {
  for (int step = begin; step < end; ++step) {
    for (auto& group : optimizer.param_groups()) group.options().set_lr(0.01 / (1 + step));
    optimizer.zero_grad();
    back_propagate(model, step);
    optimizer.step();
  }
}

inline void expect_same_weights(const torch::nn::Module& got, const torch::nn::Module& want) {
  EXPECT_TRUE(test::same_bits(test::copies(got.parameters()), test::copies(want.parameters())));
}

inline std::int64_t elements_of_adam_state(const torch::optim::Optimizer& optimizer) {
  std::int64_t elements = 0;
  for (const auto& [parameter, state] : optimizer.state()) {
    const auto& adam_state = static_cast<const torch::optim::AdamParamState&>(*state);
    for (const at::Tensor& tensor :
         {adam_state.exp_avg(), adam_state.exp_avg_sq(), adam_state.max_exp_avg_sq()})
      elements += tensor.defined() ? tensor.numel() : 0;
  }
  return elements;
}

}  // namespace semitone::parallel::zero_test
