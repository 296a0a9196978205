// GradScaler: copies, saving and loading.

#include "semitone/core/error.h"
#include "semitone/scaling/grad_scaler.h"
#include "tests/scaling/grad_scaler_fixture.h"
#include "tests/support/archive.h"
#include "tests/support/errors.h"
#include "tests/support/optimizers.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>

namespace semitone::amp::grad_scaler_test {
namespace {

using test::message_of;
using test::same_bits;
using test::saved;
using testing::HasSubstr;

TEST(GradScaler, ACopyGoesItsOwnWay) {
  One one(kInf);
  GradScaler scaler = used_once();
  GradScaler copy = scaler;
  scaler.step(one.optimizer);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 64);
  EXPECT_EQ(copy.get_scale(), 128);
  EXPECT_THROW(copy.update(), Error);
  one.set_grad(1);
  copy.step(one.optimizer);
  copy.update();
  EXPECT_EQ(copy.get_scale(), 256);
}

TEST(GradScaler, CopiesKnowTheirOwnUnscaledGradients) {
  const auto mine = parameter({1});
  const auto other = parameter({1});
  torch::optim::SGD optimizer({mine}, 1.0);
  torch::optim::SGD others({other}, 1.0);
  GradScaler scaler(LossScaleOptions::fixed(128));
  GradScaler copy = scaler;
  scaler.scale((4 * mine).sum()).backward();
  scaler.unscale_(optimizer);
  copy.scale((3 * other).sum()).backward();
  EXPECT_EQ(copy.step(others), Step::stepped);
  copy.update();
  mine.mutable_grad().mul_(0.5);
  EXPECT_EQ(scaler.step(optimizer), Step::stepped);
  EXPECT_EQ(mine.item<float>(), 1 - 2);
  EXPECT_EQ(other.item<float>(), 1 - 3);
}

TEST(GradScaler, SavedAndLoadedEveryStepItTrainsAsBefore) {
  const auto kind = test::all_optimizers()[2];
  Training straight(kind);
  Training resumed(kind);
  GradScaler scaler(LossScaleOptions(kRule).growth_interval(2));
  auto interrupted = std::make_unique<GradScaler>(LossScaleOptions(kRule).growth_interval(2));
  for (int i = 0; i < 8; ++i) {
    const auto iterate = [i](Training& training, GradScaler& with) {
      training.optimizer->zero_grad();
      with.scale(training.loss(static_cast<std::size_t>(i % 4))).backward();
      if (i == 3) training.net->first->bias.mutable_grad()[0] = kNan;
      with.step(*training.optimizer);
      with.update();
    };
    iterate(straight, scaler);
    iterate(resumed, *interrupted);
    auto archive = saved(*interrupted);
    interrupted = std::make_unique<GradScaler>();
    interrupted->load(archive);
    EXPECT_EQ(interrupted->scaler().state(), scaler.scaler().state());
    EXPECT_EQ(interrupted->scaler().skipped_steps(), scaler.scaler().skipped_steps());
  }
  EXPECT_TRUE(same_bits(resumed.net->first->weight, straight.net->first->weight));
}

TEST(GradScaler, LoadsBeforeAndAfterFirstUse) {
  GradScaler saved_one = used_once();
  saved_one.update(512);
  for (const bool used : {false, true}) {
    GradScaler scaler = used ? used_once() : GradScaler();
    auto archive = saved(saved_one);
    scaler.load(archive);
    EXPECT_EQ(scaler.get_scale(), 512);
    EXPECT_EQ(scaler.scale(torch::ones({})).item<float>(), 512);
  }
}

TEST(GradScaler, LoadForgetsWhatAnInterruptedIterationFound) {
  One one(kInf);
  GradScaler scaler = used_once();
  auto archive = saved(scaler);
  scaler.step(one.optimizer);
  scaler.load(archive);
  EXPECT_THROW(scaler.update(), Error);
  one.set_grad(1);
  EXPECT_EQ(scaler.step(one.optimizer), Step::stepped);
}

TEST(GradScaler, SavingInTheMiddleOfAnIterationIsAnError) {
  One one;
  GradScaler scaler = used_once();
  scaler.unscale_(one.optimizer);
  EXPECT_THAT(message_of<Error>([&] { saved(scaler); }), HasSubstr("save after update()"));
  scaler.step(one.optimizer);
  EXPECT_THROW(saved(scaler), Error);
  scaler.update();
  EXPECT_NO_THROW(saved(scaler));
}

TEST(GradScaler, DisabledOnesSaveAndLoadNothing) {
  const GradScaler disabled({}, false);
  GradScaler enabled;
  auto of_disabled = saved(disabled);
  EXPECT_THAT(message_of<FileError>([&] { enabled.load(of_disabled); }),
              HasSubstr("that of a disabled one"));
  auto of_enabled = saved(enabled);
  GradScaler other({}, false);
  EXPECT_NO_THROW(other.load(of_enabled));
  EXPECT_EQ(other.get_scale(), 1);
  auto again = saved(disabled);
  EXPECT_NO_THROW(other.load(again));
}

TEST(GradScaler, LoadingSomethingElseIsAnErrorThatChangesNothing) {
  GradScaler scaler = used_once();
  auto other = test::archived(
      [](torch::serialize::OutputArchive& archive) { archive.write("weight", torch::ones({2})); });
  EXPECT_THAT(message_of<FileError>([&] { scaler.load(other); }),
              HasSubstr("'enabled' in the archive"));
  EXPECT_EQ(scaler.get_scale(), 128);
}

}  // namespace
}  // namespace semitone::amp::grad_scaler_test
