// Weights that are inf or NaN.

#include "semitone/checkpoint.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace semitone::checkpoint::test {
namespace {

using semitone::test::message_of;
using semitone::test::TemporaryFolder;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

void set_first(const at::Tensor& tensor, double value) {
  const torch::NoGradGuard no_grad;
  tensor.view(-1)[0] = value;
}

class NonFiniteWeights : public testing::TestWithParam<c10::ScalarType> {
 protected:
  NonFiniteWeights() { model_->to(GetParam()); }

  Checkpoint make(const CheckpointOptions& options) {
    Checkpoint made(folder_ / "run", options);
    made.add("model", model_);
    return made;
  }

  const TemporaryFolder folder_;
  torch::nn::Sequential model_{torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4)};
};

TEST_P(NonFiniteWeights, DoNotTakeThePlaceOfTheLastGoodCheckpoint) {
  auto checkpoint = make(CheckpointOptions().keep(1));
  checkpoint.save(1);
  const at::Tensor weight = model_->parameters()[0];
  const double good = weight.view(-1)[0].item<double>();
  for (const double bad : {std::nan(""), kInfinity, -kInfinity}) {
    set_first(weight, bad);
    EXPECT_THAT(message_of<DivergedError>([&] { checkpoint.save(2); }),
                AllOf(HasSubstr("'0.weight'"), HasSubstr(std::isnan(bad) ? "NaN" : "inf")));
    EXPECT_THROW(checkpoint.save_async(2), DivergedError);
    checkpoint.wait();
    EXPECT_THAT(checkpoint.steps(), ElementsAre(1));
  }
  EXPECT_EQ(checkpoint.resume(), 1);
  EXPECT_EQ(weight.view(-1)[0].item<double>(), good);
  checkpoint.save(2);
  EXPECT_THAT(checkpoint.steps(), ElementsAre(2));
}

TEST_P(NonFiniteWeights, AreSavedIfTheProgramSaysSo) {
  auto checkpoint = make(CheckpointOptions().nonfinite_weights(true));
  const at::Tensor weight = model_->parameters()[0];
  set_first(weight, -kInfinity);
  checkpoint.save(1);
  set_first(weight, 0);
  EXPECT_EQ(checkpoint.resume(), 1);
  EXPECT_EQ(weight.view(-1)[0].item<double>(), -kInfinity);
}

TEST_P(NonFiniteWeights, OfFrozenParametersAndBuffersAreNoDivergence) {
  auto checkpoint = make({});
  const at::Tensor mask = model_->parameters()[0];
  mask.requires_grad_(false);
  set_first(mask, -kInfinity);
  set_first(model_->buffers()[0], kInfinity);
  checkpoint.save(1);
  EXPECT_THAT(checkpoint.steps(), ElementsAre(1));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, NonFiniteWeights,
                         testing::Values(torch::kFloat, torch::kDouble, torch::kBFloat16),
                         [](const auto& tested) { return c10::toString(tested.param); });

}  // namespace
}  // namespace semitone::checkpoint::test
