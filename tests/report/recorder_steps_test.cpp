// Which steps a Recorder looks at, and what it leaves as it was.

#include "semitone/report/recorder.h"
#include "tests/report/samples.h"
#include "tests/support/captured_log.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/toy_nets.h"

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace semitone::report::recorder_steps_test {
namespace {

using semitone::test::CapturedLog;
using semitone::test::expect_error;
using semitone::test::TemporaryFolder;
using semitone::test::ToyNet;
using test::expect_sampled;
using test::find_in;
using test::sample_in;
using test::sampled_steps;
using test::tensor_in;
using testing::ElementsAre;
using testing::HasSubstr;

void train_step(ToyNet& net) {
  net(torch::ones({2, 6})).sum().backward();
}

bool is_watched() {
  return !at::get_record_function_tls_().sorted_tls_callbacks_.empty();
}

TEST(RecorderSteps, EveryNthIsLookedAtFromTheFirst) {
  const TemporaryFolder folder;
  ToyNet net;
  {
    RunLog log(folder.path());
    log.set_step(4);
    const Recorder recorder(log, *net, RecorderOptions().every(3));
    EXPECT_FALSE(is_watched());
    for (std::int64_t step = 5; step <= 12; ++step) {
      log.set_step(step);
      log.set_step(step);  // goes on
      EXPECT_EQ(is_watched(), (step - 5) % 3 == 0) << step;
      const at::Tensor output = net->first->forward(torch::ones({2, 6}));
      EXPECT_EQ(output.grad_fn()->tensor_pre_hooks().empty(), !is_watched()) << step;
    }
  }
  EXPECT_FALSE(is_watched());
  EXPECT_THAT(sampled_steps(folder.path()), ElementsAre(5, 8, 11));
}

TEST(RecorderSteps, TheLastOneEndsWithTheRecorder) {
  const TemporaryFolder folder;
  ToyNet net;
  RunLog log(folder.path());
  {
    const Recorder recorder(log, *net);
    log.set_step(1);
    train_step(net);
  }
  EXPECT_FALSE(is_watched());
  train_step(net);
  log.set_step(2);
  log.close();
  const nlohmann::json sample = sample_in(folder.path());
  EXPECT_EQ(find_in(sample.at("operators"), {{"name", "relu"}}).at("calls"), 1);
}

TEST(RecorderSteps, AreRecordedAgainAfterAResume) {
  const TemporaryFolder folder;
  ToyNet net;
  for (const std::int64_t first : {1, 3}) {
    RunLog log(folder.path());
    const Recorder recorder(log, *net, RecorderOptions().every(2));
    for (std::int64_t step = first; step < first + 4; ++step) log.set_step(step);
    log.set_step(first);  // back
  }
  std::vector<std::string> lines;
  for (const auto& line : test::samples_in(folder.path()))
    lines.push_back(line.at("kind").get<std::string>() + " " + line.at("step").dump());
  EXPECT_THAT(lines,
              ElementsAre("model 1", "sample 1", "sample 3", "restart 1", "sample 1", "restart 3",
                          "model 3", "sample 3", "sample 5", "restart 3", "sample 3"));
}

TEST(RecorderSteps, ThatAnExceptionEndsAreLeftOut) {
  const TemporaryFolder folder;
  ToyNet net;
  try {
    RunLog log(folder.path());
    const Recorder recorder(log, *net, RecorderOptions().every(1));
    log.set_step(1);
    train_step(net);
    log.set_step(2);
    throw std::runtime_error("out of data");
  } catch (const std::runtime_error&) {
  }
  EXPECT_THAT(sampled_steps(folder.path()), ElementsAre(1));
  EXPECT_FALSE(is_watched());
}

TEST(RecorderSteps, GoOnAfterAnExceptionOfAnOperator) {
  const TemporaryFolder folder;
  ToyNet net;
  RunLog log(folder.path());
  const Recorder recorder(log, *net);
  log.set_step(1);
  EXPECT_THROW(net(torch::ones({2, 5})), c10::Error);
  train_step(net);
  log.close();
  const nlohmann::json sample = sample_in(folder.path());
  EXPECT_EQ(find_in(sample.at("operators"), {{"name", "addmm"}}).at("calls"), 3);
  EXPECT_EQ(tensor_in(sample, "output", "first").at("numel"), 16);
}

TEST(RecorderSteps, WithWhatCannotBeComparedAreLeftOutWithAWarning) {
  const TemporaryFolder folder;
  ToyNet net;
  const CapturedLog captured;
  RunLog log(folder.path());
  const Recorder recorder(log, *net, RecorderOptions().every(1));
  log.set_step(1);
  net->first->bias.set_data(torch::zeros({9}));  // of another size than at the beginning
  log.set_step(2);
  log.close();
  EXPECT_THAT(sampled_steps(folder.path()), ElementsAre(2));
  EXPECT_THAT(captured.text(), HasSubstr("step 1 is left out of the samples"));
}

TEST(RecorderSteps, OfInferenceHaveOutputsOnly) {
  const TemporaryFolder folder;
  ToyNet net;
  RunLog log(folder.path());
  const Recorder recorder(log, *net, RecorderOptions().every(1));
  for (const std::int64_t step : {1, 2}) {
    const c10::InferenceMode inference(step == 1);
    log.set_step(step);
    const at::Tensor output = net->first->forward(torch::ones({2, 6}));
    EXPECT_EQ(output.is_inference(), step == 1);
  }
  log.close();
  const auto samples = test::lines_of_kind(folder.path(), "sample");
  ASSERT_EQ(samples.size(), 2U);
  for (const auto& sample : samples) {
    EXPECT_EQ(tensor_in(sample, "output", "first").at("numel"), 16);
    EXPECT_TRUE(find_in(sample.at("tensors"), {{"what", "output_gradient"}}).is_null());
  }
}

TEST(RecorderSteps, SeeAModelThatWasCastInBetween) {
  const TemporaryFolder folder;
  ToyNet net;
  RunLog log(folder.path());
  const Recorder recorder(log, *net, RecorderOptions().every(1));
  log.set_step(1);
  net->first->forward(torch::ones({2, 6}));
  net->to(torch::kBFloat16);
  log.set_step(2);
  const at::Tensor output = net->first->forward(torch::ones({2, 6}, torch::kBFloat16));
  log.close();
  const auto samples = test::lines_of_kind(folder.path(), "sample");
  ASSERT_EQ(samples.size(), 2U);
  EXPECT_EQ(tensor_in(samples[0], "output", "first").at("dtype"), "Float");
  EXPECT_EQ(tensor_in(samples[1], "weight", "first.weight").at("dtype"), "BFloat16");
  expect_sampled(samples[1], "output", "first", output);
}

TEST(RecorderSteps, BelongToTheThreadOfTheRecorder) {
  const TemporaryFolder folder;
  const auto train = [&](const std::string& name, int passes) {
    torch::nn::Linear net(3, 2);
    RunLog log(folder / name);
    const Recorder recorder(log, *net, RecorderOptions().every(1));
    for (std::int64_t step = 1; step <= 20; ++step) {
      log.set_step(step);
      for (int pass = 0; pass < passes; ++pass) net(torch::ones({5, 3})).sum().backward();
      const torch::NoGradGuard no_grad;
      net->bias += 1;
    }
  };
  std::thread other(train, "a", 1);
  train("b", 2);
  other.join();
  for (const int passes : {1, 2}) {
    const auto samples = test::lines_of_kind(folder / (passes == 1 ? "a" : "b"), "sample");
    ASSERT_EQ(samples.size(), 20U);
    for (const auto& sample : samples) {
      EXPECT_EQ(find_in(sample.at("operators"), {{"name", "addmm"}}).at("calls"), passes);
      EXPECT_EQ(tensor_in(sample, "output_gradient", "").at("numel"), 10 * passes);
    }
  }
}

TEST(RecorderSteps, AreNotSetOnAnotherThread) {
  const TemporaryFolder folder;
  ToyNet net;
  RunLog log(folder.path());
  const Recorder recorder(log, *net);
  log.set_step(1);
  std::thread([&] {
    expect_error([&] { log.set_step(2); }, {"report.recorder", "another thread"});
  }).join();
  log.close();
  EXPECT_THAT(sampled_steps(folder.path()), ElementsAre(1));
}

TEST(RecorderSteps, AreDiscardedIfAnotherThreadClosesTheLog) {
  const TemporaryFolder folder;
  ToyNet net;
  const CapturedLog captured;
  for (const bool goes_on : {false, true}) {
    RunLog log(folder.path());
    const Recorder recorder(log, *net);
    log.set_step(1);
    std::thread([&] { log.close(Outcome::stopped, "SIGTERM"); }).join();
    train_step(net);
    if (goes_on) expect_error([&] { log.set_step(2); }, {"after close()"});
  }
  EXPECT_FALSE(is_watched());
  EXPECT_EQ(captured.text(), "");
  EXPECT_THAT(sampled_steps(folder.path()), ElementsAre());
  EXPECT_EQ(test::json_in(folder / "run.json").at("outcome"), "stopped");
}

TEST(RecorderSteps, OfRanksThatDoNotWriteAreNotLookedAt) {
  const TemporaryFolder folder;
  ToyNet net;
  RunLog log(folder / "run", RunLogOptions().rank(1).world_size(2));
  const Recorder recorder(log, *net);
  log.set_step(1);
  EXPECT_FALSE(is_watched());
  EXPECT_FALSE(events::listening());
  log.close();
  EXPECT_FALSE(std::filesystem::exists(folder / "run"));
}

TEST(RecorderSteps, OptionsOutOfRangeAndASecondRecorderAreErrors) {
  const TemporaryFolder folder;
  ToyNet net;
  RunLog log(folder.path());
  expect_error([&] { const Recorder none(log, *net, RecorderOptions().every(0)); },
               {"report.recorder", "at least 1", "0"});
  auto recorder = std::make_unique<Recorder>(log, *net);
  expect_error([&] { const Recorder second(log, *net); }, {"one Recorder"});
  recorder.reset();
  const Recorder third(log, *net);
  log.set_step(1);
  EXPECT_TRUE(is_watched());
}

// Outputs that are views, changed in place, used twice, and differentiated twice.
std::vector<at::Tensor> gradients_with_views(RunLog* log) {
  torch::manual_seed(8);
  torch::nn::Sequential net(torch::nn::Conv1d(2, 3, 3), torch::nn::Linear(4, 2));
  std::optional<Recorder> recorder;
  if (log != nullptr) {
    recorder.emplace(*log, *net);
    log->set_step(1);
  }
  const at::Tensor view = net->ptr<torch::nn::Conv1dImpl>(0)->forward(torch::randn({5, 2, 6}));
  const at::Tensor hidden = net->ptr<torch::nn::LinearImpl>(1)->forward(view.neg_());
  hidden.slice(0, 0, 2).mul_(2);
  const at::Tensor loss = (hidden.exp().sum() + hidden.square().sum()).square();
  auto grads = torch::autograd::grad({loss}, net->parameters(), {}, true, /*create_graph=*/true);
  at::Tensor sum = torch::zeros({});
  for (const at::Tensor& grad : grads) sum = sum + grad.square().sum();
  const auto second = torch::autograd::grad({sum}, net->parameters());
  grads.insert(grads.end(), second.begin(), second.end());
  return semitone::test::copies(grads);
}

TEST(RecorderSteps, LeaveViewsAndTensorsChangedInPlaceAsTheyWere) {
  const TemporaryFolder folder;
  RunLog log(folder.path());
  const auto recorded = gradients_with_views(&log);
  log.close();
  semitone::test::expect_bitwise_equal(recorded, gradients_with_views(nullptr));
  const nlohmann::json sample = sample_in(folder.path());
  EXPECT_EQ(tensor_in(sample, "output", "0").at("numel"), 60);
  EXPECT_EQ(tensor_in(sample, "output", "1").at("numel"), 30);
}

TEST(RecorderSteps, LeaveNoMemoryInTheGraph) {
  const TemporaryFolder folder;
  ToyNet net;
  RunLog log(folder.path());
  at::Tensor kept;
  {
    const Recorder recorder(log, *net);
    log.set_step(1);
    kept = net(torch::ones({2, 6}));
  }
  kept.sum().backward();  // its hooks do nothing now
  log.close();
  EXPECT_TRUE(
      find_in(sample_in(folder.path()).at("tensors"), {{"what", "output_gradient"}}).is_null());
}

}  // namespace
}  // namespace semitone::report::recorder_steps_test
