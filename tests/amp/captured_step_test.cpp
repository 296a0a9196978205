// Captured steps against those of operators, of a loop by hand, and of LibTorch alone.

#include "semitone/amp/captured_step.h"

#include "semitone/optim/fused_sgd.h"
#include "src/amp/step_graph.h"
#include "src/core/autograd_node.h"
#include "tests/amp/captured_steps_fixture.h"
#include "tests/support/tensors.h"
#include "tests/support/toy_nets.h"

#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace semitone::amp {

// Replaces the library's function.
std::unique_ptr<StepGraph> make_step_graph(c10::Device /*device*/) {
  if (!captured_step_test::graphs().exist) return nullptr;
  return std::make_unique<captured_step_test::FunctionGraph>();
}

namespace captured_step_test {
namespace {

using test::expect_bitwise_equal;

TEST_F(CapturedSteps, AreTheStepsThatOperatorsTake) {
  for (const Kind& of : kinds()) {
    for (const Options& options : all_options()) {
      SCOPED_TRACE(of.name + " " + Properties::resolve(options, torch::kCPU).to_string());
      const Properties level = Properties::resolve(options, torch::kCPU);
      const bool has_fp16_weights = level.opt_level == OptLevel::O3 && level.dtype == torch::kHalf;
      if (of.name == "SplitAdam" && has_fp16_weights) continue;  // only bf16 can be split
      graphs() = {};
      Training want(of, options, {}, false);
      Training got(of, options);
      for (std::uint64_t i = 0; i < 12; ++i) {
        SCOPED_TRACE("step " + std::to_string(i));
        for (Training* one : {&got, &want})  // as a scheduler does
          one->optimizer->param_groups()[0].options().set_lr(0.02 / double(1 + i));
        const bool overflows = i % 7 == 5 && got.is_checked();
        expect_same_step(got, want, overflows ? overflowing_batch() : batch(i));
        if (HasFailure()) return;
      }
      EXPECT_EQ(graphs().warm_ups, 3);
      EXPECT_EQ(graphs().captures, 1);
      EXPECT_EQ(graphs().replays, 9);
      EXPECT_TRUE(got.step->is_captured());
      EXPECT_FALSE(want.step->is_captured());
      EXPECT_EQ(got.mixed->skipped_steps() > 0, got.is_checked());
    }
  }
}

// It would keep the streams of that step, for which a capture cannot wait.
TEST_F(CapturedSteps, DoNotShareNodesOfTheGraphWithALossThatTheProgramKeeps) {
  for (const OptLevel level : {OptLevel::O1, OptLevel::O2}) {
    graphs() = {};
    Training training(kinds().front(), Options(level));
    const at::Tensor kept = training.loss(batch(0));
    const at::Tensor weight = training.model->parameters()[0];
    const auto node = torch::autograd::impl::try_get_grad_accumulator(weight);
    ASSERT_NE(node, nullptr);
    std::vector<NodePtr> nodes;
    CapturedStep step(*training.mixed, *training.optimizer, [&](const Batch& data) {
      const at::Tensor loss = training.loss(data);
      if (graphs().capturing)
        nodes.push_back(torch::autograd::impl::try_get_grad_accumulator(weight));
      return loss;
    });
    for (std::uint64_t i = 0; i < 4; ++i) step.run(batch(i));
    ASSERT_EQ(nodes.size(), 1U);
    EXPECT_NE(nodes[0], nullptr);
    EXPECT_NE(nodes[0], node);
  }
}

TEST_F(CapturedSteps, AreThoseOfALoopByHand) {
  for (const Kind& of : kinds()) {
    for (const Options& options : all_options()) {
      const Properties level = Properties::resolve(options, torch::kCPU);
      SCOPED_TRACE(of.name + " " + level.to_string());
      const bool has_fp16_weights = level.opt_level == OptLevel::O3 && level.dtype == torch::kHalf;
      if (of.name == "SplitAdam" && has_fp16_weights) continue;  // only bf16 can be split
      graphs() = {};
      Training want(of, options, {}, false);
      Training got(of, options);
      for (std::uint64_t i = 0; i < 8; ++i) {
        SCOPED_TRACE("step " + std::to_string(i));
        const Batch data = i % 7 == 5 && got.is_checked() ? overflowing_batch() : batch(i);
        const auto [loss, step] = got.step->run(data);
        want.optimizer->zero_grad();
        const at::Tensor by_hand = want.loss(data);
        want.mixed->scale_loss(by_hand, *want.optimizer).backward();
        EXPECT_EQ(step, want.mixed->step(*want.optimizer));
        want.model->zero_grad();
        want.optimizer->zero_grad();
        expect_bitwise_equal(loss, by_hand.detach());
        expect_same(got, want);
        if (HasFailure()) return;
      }
      EXPECT_GT(graphs().replays, 0);
    }
  }
}

// The reference uses no mixed precision.
TEST_F(CapturedSteps, InFp32AreThoseOfLibTorchAlone) {
  for (const Kind& of : kinds()) {
    SCOPED_TRACE(of.name);
    graphs() = {};
    Training got(of, Options("O0"));
    torch::manual_seed(1);
    test::ToyConvNet model;
    const auto optimizer = of.make(model->parameters());
    for (std::uint64_t i = 0; i < 8; ++i) {
      const Batch data = batch(i);
      const auto [loss, step] = got.step->run(data);
      optimizer->zero_grad();
      const at::Tensor by_hand = model(data[0]).sub(data[1]).pow(2).mean();
      by_hand.backward();
      optimizer->step();
      EXPECT_EQ(step, Step::stepped);
      expect_bitwise_equal(loss, by_hand.detach());
      for (std::size_t k = 0; k < model->parameters().size(); ++k)
        expect_bitwise_equal(got.model->parameters()[k], model->parameters()[k]);
    }
    EXPECT_GT(graphs().replays, 0);
  }
}

TEST_F(CapturedSteps, ClipTheNormOfAllGradients) {
  const Kind sgd = kind<optim::FusedSGD>("SGD", optim::FusedSGDOptions(1));
  const auto clipping = CapturedStepOptions().max_grad_norm(0.125);
  for (const Options& options : all_options()) {
    SCOPED_TRACE(Properties::resolve(options, torch::kCPU).to_string());
    Training want(sgd, options, clipping, false);
    Training got(sgd, options, clipping);
    for (std::uint64_t i = 0; i < 6; ++i) expect_same_step(got, want, batch(i));
  }
  // The squares of a finite gradient overflow fp32.
  {
    torch::nn::Linear model(torch::nn::LinearOptions(4, 1).bias(false));
    torch::nn::init::zeros_(model->weight);
    optim::FusedSGD optimizer(model->parameters(), optim::FusedSGDOptions(1));
    auto mixed = initialize(model, optimizer, Options("O1").dtype(torch::kBFloat16).verbosity(0));
    CapturedStep step(
        mixed, optimizer,
        [&](const std::vector<at::Tensor>& batch) { return mixed.forward(model, batch[0]).sum(); },
        CapturedStepOptions().max_grad_norm(1));
    EXPECT_EQ(step.run({torch::full({1, 4}, 3e19F)}).step, Step::stepped);
    EXPECT_LT((model->weight.detach() + 0.5).abs().max().item<double>(), 1e-6);
  }
  // The step is as long as the clipped gradient.
  Training training(sgd, Options("O0"), clipping);
  for (std::uint64_t i = 0; i < 5; ++i) {
    std::vector<at::Tensor> before;
    for (const at::Tensor& one : training.model->parameters()) before.push_back(one.clone());
    training.step->run(batch(i));
    double squares = 0;
    for (std::size_t k = 0; k < before.size(); ++k)
      squares += (training.model->parameters()[k] - before[k]).pow(2).sum().item<double>();
    EXPECT_NEAR(std::sqrt(squares), 0.125, 1e-6);
  }
}

TEST_F(CapturedSteps, RunBatchesOfAnotherShapeByOperators) {
  for (const Options& options : all_options()) {
    Training want(kinds()[2], options, {}, false);
    Training got(kinds()[2], options);
    for (std::uint64_t i = 0; i < 8; ++i) expect_same_step(got, want, batch(i, i == 5 ? 3 : 4));
    EXPECT_EQ(graphs().captures, 1);
    EXPECT_EQ(graphs().replays, 4);
    graphs() = {};
  }
}

TEST_F(CapturedSteps, WarmUpAgainForAnotherShape) {
  Training training(kinds()[0], Options("O2"));
  for (std::uint64_t i = 0; i < 2; ++i) training.step->run(batch(i, 4));
  for (std::uint64_t i = 0; i < 4; ++i) training.step->run(batch(i, 3));
  EXPECT_EQ(graphs().warm_ups, 5);
  EXPECT_EQ(graphs().replays, 1);
}

}  // namespace
}  // namespace captured_step_test
}  // namespace semitone::amp
