// O2 with an optimizer that splits masters: the model's bf16 weight is the upper half, the
// optimizer has the lower one.

#include "semitone/amp/initialize.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/optim/fused_sgd.h"
#include "semitone/weights/state_dict.h"
#include "tests/support/tensors.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace semitone::amp::split_masters_test {
namespace {

using test::expect_bitwise_equal;

struct Trained {
  explicit Trained(bool split, c10::ScalarType dtype = torch::kBFloat16)
      : model(make()),
        optimizer(model->parameters(), optim::FusedAdamOptions(1e-3).split_master(split)),
        mixed(initialize(model, optimizer,
                         Options(OptLevel::O2).dtype(dtype).loss_scale(128.0).verbosity(0))) {}

  static test::ToyNet make() {
    torch::manual_seed(7);
    return test::odd_net();
  }

  Step step(std::int64_t number) {
    torch::manual_seed(100 + static_cast<std::uint64_t>(number));
    optimizer.zero_grad();
    const at::Tensor loss = torch::cross_entropy_loss(mixed.forward(model, torch::randn({16, 9})),
                                                      torch::randint(5, {16}));
    mixed.scale_loss(loss, optimizer).backward();
    return mixed.step(optimizer);
  }

  std::vector<at::Tensor> exact() {
    const auto fp32 = mixed.fp32_weights(model);
    return test::copies(model->parameters());
  }

  test::ToyNet model;
  optim::FusedAdam optimizer;
  MixedPrecision mixed;
};

TEST(SplitMasters, StartFromTheWeightsBeforeTheCast) {
  Trained split(true);
  const test::ToyNet original = Trained::make();
  const auto values = split.exact();
  for (std::size_t i = 0; i < values.size(); ++i)
    expect_bitwise_equal(values[i], original->parameters()[i].detach());
}

TEST(SplitMasters, TrainAsWholeOnesDo) {
  Trained split(true);
  Trained whole(false);
  for (std::int64_t number = 0; number < 8; ++number) {
    EXPECT_EQ(split.step(number), Step::stepped);
    EXPECT_EQ(whole.step(number), Step::stepped);
    const auto got = split.exact();
    const auto want = whole.exact();
    for (std::size_t i = 0; i < want.size(); ++i) expect_bitwise_equal(got[i], want[i]);
  }
}

TEST(SplitMasters, AreTheModelsOwnWeights) {
  Trained split(true);
  split.step(0);
  const auto parameters = split.model->parameters();
  const auto optimized = split.mixed.master_params(split.optimizer);
  for (std::size_t i = 0; i < parameters.size(); ++i)
    EXPECT_TRUE(optimized[i].is_same(parameters[i]));
}

TEST(SplitMasters, OfALayerThatIsFrozenLaterStayExact) {
  Trained split(true);
  split.step(0);
  const auto trained = split.exact();
  const at::Tensor frozen = split.model->parameters().front();
  frozen.set_requires_grad(false);
  const auto saved = weights::state_dict(split.model);
  expect_bitwise_equal(saved[0].value(), trained.front());

  frozen.zero_();
  weights::load_state_dict(split.model, saved);
  expect_bitwise_equal(split.exact().front(), trained.front());
}

TEST(SplitMasters, StayInSavedTraining) {
  Trained first(true);
  for (std::int64_t number = 0; number < 3; ++number) first.step(number);
  std::stringstream model;
  std::stringstream optimizer;
  std::stringstream mixed;
  {
    const auto fp32 = first.mixed.fp32_weights(first.model);
    torch::save(first.model, model);
  }
  torch::save(first.optimizer, optimizer);
  torch::serialize::OutputArchive archive;
  first.mixed.save(archive);
  archive.save_to(mixed);

  Trained second(true);
  {
    const auto fp32 = second.mixed.fp32_weights(second.model);
    torch::load(second.model, model);
  }
  torch::load(second.optimizer, optimizer);
  torch::serialize::InputArchive saved;
  saved.load_from(mixed);
  second.mixed.load(saved);
  for (std::int64_t number = 3; number < 6; ++number) {
    first.step(number);
    second.step(number);
  }
  const auto got = second.exact();
  const auto want = first.exact();
  for (std::size_t i = 0; i < want.size(); ++i) expect_bitwise_equal(got[i], want[i]);
}

TEST(SplitMasters, AreWholeInFp16) {
  Trained trained(true, torch::kHalf);
  EXPECT_EQ(trained.step(0), Step::stepped);
  EXPECT_EQ(trained.mixed.master_params(trained.optimizer)[0].scalar_type(), torch::kFloat);
}

}  // namespace
}  // namespace semitone::amp::split_masters_test
