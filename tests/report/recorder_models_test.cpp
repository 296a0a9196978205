// A Recorder of several models.

#include "semitone/report/recorder.h"
#include "tests/report/samples.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace semitone::report::recorder_models_test {
namespace {

using semitone::test::expect_error;
using semitone::test::TemporaryFolder;
using semitone::test::ToyNet;
using test::expect_sampled;

TEST(RecorderOfModels, NamesThemByTheirPrefix) {
  const TemporaryFolder folder;
  ToyNet net;
  torch::nn::Linear critic(6, 1);
  RunLog log(folder.path());
  Recorder recorder(log, *net);
  recorder.add_model(*critic, "critic");
  log.set_step(1);
  const at::Tensor output = critic(torch::ones({2, 6}));
  net(torch::ones({2, 6}));
  log.close();
  const auto model = test::lines_of_kind(folder.path(), "model");
  ASSERT_EQ(model.size(), 1U);
  const auto& parameters = model[0].at("parameters");
  EXPECT_EQ(parameters.size(), 6U);
  EXPECT_EQ(test::find_in(parameters, {{"name", "critic.bias"}}).at("layer_type"), "Linear");
  const nlohmann::json sample = test::sample_in(folder.path());
  expect_sampled(sample, "weight", "critic.weight", critic->weight);
  expect_sampled(sample, "output", "critic", output);
  EXPECT_FALSE(test::tensor_in(sample, "output", "second").is_null());
}

TEST(RecorderOfModels, NamesAreUniqueAndModelsKnownBeforeTheFirstStep) {
  const TemporaryFolder folder;
  ToyNet net;
  const torch::nn::Linear critic(6, 1);
  RunLog log(folder.path());
  Recorder recorder(log, *net);
  expect_error([&] { recorder.add_model(*ToyNet()); }, {"report.recorder", "first.weight"});
  log.set_step(1);
  expect_error([&] { recorder.add_model(*critic, "critic"); },
               {"report.recorder", "before the first step", "1"});
  log.close();
  EXPECT_EQ(test::sample_in(folder.path()).at("updates").size(), 0U);
}

TEST(RecorderOfModels, AThreadHasOneRecorder) {
  const TemporaryFolder folder;
  ToyNet net;
  RunLog log(folder / "a");
  RunLog other(folder / "b");
  {
    const Recorder recorder(log, *net);
    expect_error([&] { const Recorder second(other, *net); },
                 {"report.recorder", "one Recorder", "add_model"});
  }
  EXPECT_NO_THROW(const Recorder second(other, *net));
}

}  // namespace
}  // namespace semitone::report::recorder_models_test
