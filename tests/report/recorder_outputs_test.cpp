// Which tensors a Recorder takes for the outputs of layers.

#include "semitone/core/events.h"
#include "semitone/report/recorder.h"
#include "tests/report/samples.h"
#include "tests/support/tensors.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <optional>
#include <vector>

namespace semitone::report::recorder_outputs_test {
namespace {

using semitone::test::TemporaryFolder;
using semitone::test::ToyNet;
using test::expect_sampled;
using test::sample_in;
using test::tensor_in;

// A layer of two operators, each with a parameter of its own.
struct ScaleShiftImpl : torch::nn::Module {
  ScaleShiftImpl()
      : weight(register_parameter("weight", torch::full({3}, 2.0))),
        bias(register_parameter("bias", torch::full({3}, 0.5))) {}
  at::Tensor forward(const at::Tensor& input) { return input * weight + bias; }

  at::Tensor weight;
  at::Tensor bias;
};
TORCH_MODULE(ScaleShift);

// Changes a weight, as an optimizer does if no loss scale is in use.
void update(const at::Tensor& weight) {
  const torch::NoGradGuard no_grad;
  weight.mul_(0.5);
}

TEST(RecorderOutputs, OfALayerAreThoseOfItsLastOperator) {
  const TemporaryFolder folder;
  ScaleShift net;
  RunLog log(folder.path());
  const Recorder recorder(log, *net);
  log.set_step(1);
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> gradients;
  outputs.reserve(2);
  gradients.reserve(2);
  for (const double value : {1.0, 100.0}) {
    outputs.push_back(net(torch::full({4, 3}, value)));
    outputs.back().retain_grad();
    outputs.back().square().sum().backward();
    gradients.push_back(outputs.back().grad());
  }
  update(net->weight);
  log.close();
  const nlohmann::json sample = sample_in(folder.path());
  expect_sampled(sample, "output", "", torch::cat(outputs));
  expect_sampled(sample, "output_gradient", "", torch::cat(gradients));
}

TEST(RecorderOutputs, ArePerOperatorIfALayersWeightIsUsedTwice) {
  const TemporaryFolder folder;
  torch::nn::Embedding net(torch::nn::EmbeddingOptions(5, 3));
  RunLog log(folder.path());
  const Recorder recorder(log, *net);
  log.set_step(1);
  std::vector<at::Tensor> logits;
  logits.reserve(2);
  for (int i = 0; i < 2; ++i) {
    logits.push_back(torch::linear(net(torch::arange(4) + i), net->weight));
    logits.back().retain_grad();
    logits.back().exp().sum().backward();
  }
  update(net->weight);
  log.close();
  const nlohmann::json sample = sample_in(folder.path());
  expect_sampled(sample, "output", "", torch::cat(logits));
  expect_sampled(sample, "output_gradient", "", torch::cat({logits[0].grad(), logits[1].grad()}));
}

TEST(RecorderOutputs, PenaltiesAreNone) {
  const TemporaryFolder folder;
  ToyNet net;
  const at::Tensor& weight = net->first->weight;
  const at::Tensor start = weight.detach().clone();
  RunLog log(folder.path());
  const Recorder recorder(log, *net);
  log.set_step(1);
  // As many rows as the layer has outputs: of the shape of the weight, but a batch all the same.
  const at::Tensor output = net->first->forward(torch::ones({8, 6}));
  const at::Tensor penalty = (weight - start).pow(2).sum() + (weight * 1e-3).sum() +
                             torch::mse_loss(weight, start) +
                             (weight - start.mean(1, /*keepdim=*/true)).sum();
  log.close();
  const nlohmann::json sample = sample_in(folder.path());
  expect_sampled(sample, "output", "first", output);
  EXPECT_TRUE(tensor_in(sample, "output", "second").is_null());
}

TEST(RecorderOutputs, OfAnEvaluationWithinTheStepDoNotCount) {
  for (const bool has_events : {false, true}) {
    const TemporaryFolder folder;
    ToyNet net;
    RunLog log(folder.path());
    const Recorder recorder(log, *net);
    const auto evaluate = [&](torch::nn::Linear& layer) {
      std::optional<events::PhaseScope> phase;
      if (has_events) phase.emplace(events::Phase::forward);
      const torch::NoGradGuard no_grad;
      layer(torch::full({9, layer->options.in_features()}, 100.0));
    };
    log.set_step(1);
    evaluate(net->second);
    const at::Tensor output = net->second->forward(torch::ones({2, 8}));
    evaluate(net->second);
    output.sum().backward();
    evaluate(net->second);
    evaluate(net->first);
    const at::Tensor more = net->second->forward(torch::ones({3, 8}));
    log.close();
    const nlohmann::json sample = sample_in(folder.path());
    expect_sampled(sample, "output", "second", torch::cat({output, more}));
    EXPECT_TRUE(tensor_in(sample, "output", "first").is_null());
  }
}

}  // namespace
}  // namespace semitone::report::recorder_outputs_test
