// Which gradients, scales and updates a Recorder believes.

#include "semitone/core/events.h"
#include "semitone/report/recorder.h"
#include "tests/report/samples.h"
#include "tests/support/tensors.h"
#include "tests/support/toy_nets.h"

#include <ATen/ThreadLocalState.h>
#include <torch/torch.h>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <string_view>
#include <vector>

namespace semitone::report::recorder_gradients_test {
namespace {

using semitone::test::TemporaryFolder;
using semitone::test::ToyNet;
using test::expect_sampled;
using test::find_in;
using test::sample_in;
using test::tensor_in;

void backward(ToyNet& net, double scale = 1) {
  (net(torch::ones({2, 6})).sum() * scale).backward();
}

// As a scaler does: the gradients of a layer are used, still multiplied by the scale.
void emit_step(torch::nn::LinearImpl& layer, double scale, double next) {
  const std::vector<at::Tensor> parameters = layer.parameters();
  const auto gradients = semitone::test::gradients_of(parameters);
  events::emit(events::GradientsReady{parameters, gradients, parameters, scale});
  events::emit(events::LossScaleUpdated{0, scale, next, false});
}

bool has_any(const nlohmann::json& sample, std::string_view what) {
  return !find_in(sample.at("tensors"), {{"what", what}}).is_null();
}

// A loss scale has to fit what the backward pass makes.
TEST(RecorderGradients, AreThoseBeforeTheProgramClipsThem) {
  const TemporaryFolder folder;
  ToyNet net;
  RunLog log(folder.path());
  const Recorder recorder(log, *net, RecorderOptions().every(1));
  const std::vector<at::Tensor> parameters = net->first->parameters();
  const at::Tensor gradient = torch::full_like(parameters[0], 8);
  const std::vector<at::Tensor> gradients{gradient, at::Tensor()};
  for (const std::int64_t step : {1, 2}) {
    log.set_step(step);
    if (step == 1) events::emit(events::GradientsUnscaled{parameters, gradients, 1});
    const std::vector<at::Tensor> clipped{gradient / 1024, torch::ones_like(parameters[1])};
    events::emit(events::GradientsReady{parameters, clipped, parameters, 1});
  }
  log.close();
  const auto samples = test::lines_of_kind(folder.path(), "sample");
  ASSERT_EQ(samples.size(), 2U);
  EXPECT_EQ(tensor_in(samples[0], "gradient", "first.weight").at("max_abs"), 8);
  EXPECT_EQ(tensor_in(samples[0], "gradient", "first.bias").at("max_abs"), 1);
  EXPECT_EQ(tensor_in(samples[1], "gradient", "first.weight").at("max_abs"), 8.0 / 1024);
}

TEST(RecorderGradients, OfParametersWithoutAnEventMayBeScaled) {
  const TemporaryFolder folder;
  ToyNet net;
  RunLog log(folder.path());
  const Recorder recorder(log, *net, RecorderOptions().every(1));
  log.set_step(1);
  backward(net, 1024);
  emit_step(*net->first, 1024, 1024);
  log.set_step(2);  // gradients are accumulated
  backward(net, 1024);
  log.close();
  const auto samples = test::lines_of_kind(folder.path(), "sample");
  ASSERT_EQ(samples.size(), 2U);
  EXPECT_FALSE(tensor_in(samples[0], "gradient", "first.weight").is_null());
  EXPECT_TRUE(tensor_in(samples[0], "gradient", "second.weight").is_null());
  EXPECT_FALSE(has_any(samples[1], "gradient"));
  // The scale is known.
  EXPECT_TRUE(has_any(samples[1], "output_gradient"));
}

TEST(RecorderGradients, MayBeScaledUntilWeightsChange) {
  const TemporaryFolder folder;
  ToyNet net;
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  RunLog log(folder.path());
  const Recorder recorder(log, *net, RecorderOptions().every(1));
  log.set_step(1);
  backward(net, 1024);  // perhaps by a scaler whose first step is still to come
  log.set_step(2);
  backward(net);
  optimizer.step();  // nothing has divided the gradients
  log.close();
  const auto samples = test::lines_of_kind(folder.path(), "sample");
  ASSERT_EQ(samples.size(), 2U);
  for (const char* const what : {"gradient", "output_gradient"}) {
    EXPECT_FALSE(has_any(samples[0], what)) << what;
    EXPECT_TRUE(has_any(samples[1], what)) << what;
  }
}

TEST(RecorderGradients, OfOutputsAreLeftOutIfTheScaleChangedWithinTheStep) {
  const TemporaryFolder folder;
  ToyNet net;
  RunLog log(folder.path());
  const Recorder recorder(log, *net);
  log.set_step(1);
  for (const double scale : {1024, 512}) {
    net->zero_grad();
    backward(net, scale);
    emit_step(*net->first, scale, 512);
  }
  log.close();
  const nlohmann::json sample = sample_in(folder.path());
  EXPECT_FALSE(sample.contains("loss_scale"));
  EXPECT_FALSE(has_any(sample, "output_gradient"));
  expect_sampled(sample, "gradient", "first.weight", net->first->weight.grad() / 512);
}

TEST(RecorderGradients, OfOutputsAreLeftOutIfTwoScalersUpdateTheirScales) {
  const TemporaryFolder folder;
  ToyNet net;
  RunLog log(folder.path());
  const Recorder recorder(log, *net);
  log.set_step(1);
  for (const double scale : {1024, 8}) {
    net->zero_grad();
    backward(net, scale);
    emit_step(*net->first, scale, scale);
  }
  log.close();
  const nlohmann::json sample = sample_in(folder.path());
  EXPECT_EQ(sample.at("loss_scale"), 1024);
  EXPECT_FALSE(has_any(sample, "output_gradient"));
  expect_sampled(sample, "gradient", "first.weight", net->first->weight.grad() / 8);
}

TEST(RecorderGradients, AreWantedInStepsThatAreLookedAt) {
  const TemporaryFolder folder;
  ToyNet net;
  {
    RunLog log(folder.path());
    const Recorder recorder(log, *net, RecorderOptions().every(2));
    EXPECT_FALSE(events::wants_gradients());
    for (std::int64_t step = 1; step <= 4; ++step) {
      log.set_step(step);
      EXPECT_EQ(events::wants_gradients(), step % 2 == 1) << step;
    }
    log.set_step(5);
    log.close();
    EXPECT_FALSE(events::wants_gradients());
  }
  EXPECT_FALSE(events::wants_gradients());
}

TEST(RecorderUpdates, AreThoseOfParametersThatAStepNames) {
  const TemporaryFolder folder;
  ToyNet net;
  RunLog log(folder.path());
  const Recorder recorder(log, *net, RecorderOptions().every(1));
  const torch::NoGradGuard no_grad;
  log.set_step(1);
  const std::vector<at::Tensor> parameters = net->first->parameters();
  const std::vector<at::Tensor> gradients = semitone::test::copies(parameters);
  events::emit(events::GradientsReady{parameters, gradients, parameters, 1});
  log.set_step(2);  // without a step of an optimizer
  log.set_step(3);
  net->second->bias += 1;
  log.close();
  const auto samples = test::lines_of_kind(folder.path(), "sample");
  ASSERT_EQ(samples.size(), 3U);
  EXPECT_EQ(samples[0].at("updates").size(), 2U);
  EXPECT_TRUE(find_in(samples[0].at("updates"), {{"name", "second.bias"}}).is_null());
  EXPECT_EQ(samples[1].at("updates").size(), 0U);
  EXPECT_EQ(samples[2].at("updates").size(), 4U);
}

TEST(RecorderUpdates, FrozenParametersHaveNone) {
  const TemporaryFolder folder;
  ToyNet net;
  net->first->weight.requires_grad_(false);
  RunLog log(folder.path());
  const Recorder recorder(log, *net);
  const torch::NoGradGuard no_grad;
  log.set_step(1);
  net->second->bias += 1;
  log.close();
  const nlohmann::json sample = sample_in(folder.path());
  EXPECT_EQ(sample.at("updates").size(), 3U);
  EXPECT_TRUE(find_in(sample.at("updates"), {{"name", "first.weight"}}).is_null());
  EXPECT_FALSE(tensor_in(sample, "weight", "first.weight").is_null());
}

// As a task that outlives the step does.
TEST(RecorderUpdates, KeepNoWeightsAfterTheStep) {
  const TemporaryFolder folder;
  ToyNet net;
  const std::vector<at::Tensor> parameters = net->parameters();
  std::vector<at::Tensor> masters = semitone::test::copies(parameters);
  std::vector<at::ThreadLocalState> tasks;
  tasks.reserve(2);
  {
    RunLog log(folder.path());
    const Recorder recorder(log, *net, RecorderOptions().every(1));
    for (const std::int64_t step : {1, 2}) {
      log.set_step(step);
      tasks.emplace_back();
      events::emit(events::GradientsReady{parameters, parameters, masters, 1});
    }
    log.close(Outcome::failed);  // discards the second sample
  }
  for (const at::Tensor& master : masters) EXPECT_EQ(master.use_count(), 1U);
}

}  // namespace
}  // namespace semitone::report::recorder_gradients_test
