#include "semitone/optim/lr_scheduler.h"

#include "semitone/core/error.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/optim/fused_sgd.h"
#include "tests/support/archive.h"
#include "tests/support/captured_log.h"
#include "tests/support/errors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace semitone::optim {
namespace {

using test::expect_error;
using test::message_of;
using test::saved;
using torch::optim::OptimizerParamGroup;

// Two groups with the rates 0.4 and 0.1.
template <typename Optimizer, typename Options>
Optimizer two_groups() {
  std::vector<OptimizerParamGroup> groups;
  for (const double lr : {0.4, 0.1})
    groups.emplace_back(std::vector<at::Tensor>{torch::zeros({2}, torch::requires_grad())},
                        std::make_unique<Options>(lr));
  return Optimizer(groups, Options(1.0));
}

std::vector<double> lrs_of(torch::optim::Optimizer& optimizer) {
  std::vector<double> lrs;
  for (auto& group : optimizer.param_groups()) lrs.push_back(group.options().get_lr());
  return lrs;
}

LRSchedule halves() {
  return LambdaLR([](std::int64_t step) { return std::ldexp(1.0, -static_cast<int>(step)); });
}

TEST(LRScheduler, SetsTheRatesOfEveryGroupOfEveryOptimizer) {
  auto sgd = two_groups<torch::optim::SGD, torch::optim::SGDOptions>();
  auto adam = two_groups<torch::optim::AdamW, torch::optim::AdamWOptions>();
  auto rms = two_groups<torch::optim::RMSprop, torch::optim::RMSpropOptions>();
  auto fused = two_groups<FusedAdam, FusedAdamOptions>();
  for (torch::optim::Optimizer* optimizer :
       std::initializer_list<torch::optim::Optimizer*>{&sgd, &adam, &rms, &fused}) {
    LRScheduler scheduler(*optimizer, LinearLR(2).start_factor(0.5));
    EXPECT_EQ(lrs_of(*optimizer), (std::vector<double>{0.2, 0.05}));
    EXPECT_EQ(scheduler.steps(), 0);
    scheduler.step();
    scheduler.step();
    EXPECT_EQ(lrs_of(*optimizer), (std::vector<double>{0.4, 0.1}));
    EXPECT_EQ(scheduler.get_last_lr(), lrs_of(*optimizer));
    EXPECT_EQ(scheduler.base_lrs(), (std::vector<double>{0.4, 0.1}));
    EXPECT_EQ(scheduler.steps(), 2);
  }
}

TEST(LRScheduler, TheOptimizerStepsWithItsRates) {
  const at::Tensor parameter = torch::zeros({1}, torch::requires_grad());
  FusedSGD optimizer({parameter}, FusedSGDOptions(1.0));
  LRScheduler scheduler(optimizer, halves());
  for (int step = 0; step < 3; ++step) {
    parameter.mutable_grad() = torch::ones({1});
    optimizer.step();
    scheduler.step();
  }
  EXPECT_EQ(parameter.item<float>(), -1.75F);
}

TEST(LRScheduler, RefusesToOverruleAnotherScheduler) {
  auto optimizer = two_groups<torch::optim::SGD, torch::optim::SGDOptions>();
  LRScheduler scheduler(optimizer, halves());
  optimizer.param_groups()[1].options().set_lr(0.3);
  expect_error([&] { scheduler.step(); }, {"the learning rate 0.1 in group 1", "got 0.3"});
  EXPECT_EQ(scheduler.steps(), 0);
  EXPECT_EQ(lrs_of(optimizer), (std::vector<double>{0.4, 0.3}));
  scheduler.set_base_lrs({0.4, 0.3});
  scheduler.step();
  EXPECT_EQ(lrs_of(optimizer), (std::vector<double>{0.2, 0.15}));
}

TEST(LRScheduler, RefusesBaseRatesOfOtherNumbersAndRatesThatNoOptimizerCanUse) {
  auto optimizer = two_groups<torch::optim::SGD, torch::optim::SGDOptions>();
  LRScheduler scheduler(optimizer, halves());
  expect_error([&] { scheduler.set_base_lrs({0.1}); }, {"2 base rates", "got 1"});
  expect_error([&] { scheduler.set_base_lrs({0.1, -1}); }, {"at least 0", "-1", "group 1"});
  expect_error([&] { scheduler.set_base_lrs({0.1, std::nan("")}); }, {"finite", "nan"});
  EXPECT_EQ(lrs_of(optimizer), (std::vector<double>{0.4, 0.1}));
  expect_error([&] { LRScheduler(optimizer, LambdaLR([](std::int64_t) { return HUGE_VAL; })); },
               {"finite", "inf"});
  EXPECT_EQ(lrs_of(optimizer), (std::vector<double>{0.4, 0.1}));
}

TEST(LRScheduler, ACycleEndsWithAnErrorOneStepAfterItsLast) {
  auto optimizer = two_groups<torch::optim::SGD, torch::optim::SGDOptions>();
  LRScheduler scheduler(optimizer, OneCycleLR(3));
  for (int step = 0; step < 3; ++step) scheduler.step();
  const auto last = lrs_of(optimizer);
  expect_error([&] { scheduler.step(); }, {"a step from 0 to 3", "4", "number of all steps"});
  EXPECT_EQ(scheduler.steps(), 3);
  EXPECT_EQ(lrs_of(optimizer), last);
}

TEST(LRScheduler, LaterGroupsFollowFromTheNextStepOn) {
  auto optimizer = two_groups<torch::optim::SGD, torch::optim::SGDOptions>();
  LRScheduler scheduler(optimizer, halves());
  scheduler.step();
  optimizer.add_param_group(
      OptimizerParamGroup({torch::zeros({1})}, std::make_unique<torch::optim::SGDOptions>(0.8)));
  EXPECT_EQ(lrs_of(optimizer), (std::vector<double>{0.2, 0.05, 0.8}));
  scheduler.step();
  EXPECT_EQ(lrs_of(optimizer), (std::vector<double>{0.1, 0.025, 0.2}));
  EXPECT_EQ(scheduler.base_lrs(), (std::vector<double>{0.4, 0.1, 0.8}));
}

TEST(LRScheduler, ResumesWithGroupsThatWereAddedSinceTheLastStep) {
  const auto added = [] {
    return OptimizerParamGroup({torch::zeros({1})},
                               std::make_unique<torch::optim::SGDOptions>(0.8));
  };
  for (const bool optimizer_first : {true, false}) {
    auto optimizer = two_groups<torch::optim::SGD, torch::optim::SGDOptions>();
    LRScheduler scheduler(optimizer, halves());
    scheduler.step();
    optimizer.add_param_group(added());
    auto optimizer_file = saved(optimizer);
    auto file = saved(scheduler);
    auto resumed = two_groups<torch::optim::SGD, torch::optim::SGDOptions>();
    resumed.add_param_group(added());
    LRScheduler again(resumed, halves());
    if (optimizer_first) resumed.load(optimizer_file);
    again.load(file);
    if (!optimizer_first) resumed.load(optimizer_file);
    EXPECT_EQ(lrs_of(resumed), (std::vector<double>{0.2, 0.05, 0.8})) << optimizer_first;
    again.step();
    EXPECT_EQ(lrs_of(resumed), (std::vector<double>{0.1, 0.025, 0.2})) << optimizer_first;
  }
}

// The optimizer's own file has the rates too: the order of loading has no effect.
TEST(LRScheduler, ResumesExactlyWithTheOptimizerLoadedBeforeOrAfter) {
  const LRSchedule schedule = SequentialLR({LinearLR(3), CosineAnnealingLR(17).eta_min(1e-3)}, {3});
  auto whole = two_groups<torch::optim::AdamW, torch::optim::AdamWOptions>();
  LRScheduler expected(whole, schedule);
  for (int step = 0; step < 9; ++step) expected.step();
  for (const bool optimizer_first : {true, false}) {
    auto optimizer_file = saved(whole);
    auto file = saved(expected);
    auto resumed = two_groups<torch::optim::AdamW, torch::optim::AdamWOptions>();
    for (auto& group : resumed.param_groups()) group.options().set_lr(7);
    LRScheduler scheduler(resumed, schedule);
    if (optimizer_first) resumed.load(optimizer_file);
    scheduler.load(file);
    if (!optimizer_first) resumed.load(optimizer_file);
    EXPECT_EQ(scheduler.steps(), 9);
    EXPECT_EQ(lrs_of(resumed), lrs_of(whole));
    for (int step = 10; step < 14; ++step) {
      scheduler.step();
      EXPECT_EQ(lrs_of(resumed),
                (std::vector<double>{schedule.lr(0.4, step), schedule.lr(0.1, step)}));
    }
  }
}

TEST(LRScheduler, WarnsIfTheProgramsScheduleIsNotTheSavedRuns) {
  auto optimizer = two_groups<torch::optim::SGD, torch::optim::SGDOptions>();
  LRScheduler first(optimizer, CosineAnnealingLR(10));
  for (int step = 0; step < 4; ++step) first.step();
  auto same = saved(first);
  auto other = saved(first);
  auto resumed = two_groups<torch::optim::SGD, torch::optim::SGDOptions>();
  {
    const test::CapturedLog log;
    LRScheduler scheduler(resumed, CosineAnnealingLR(10));
    scheduler.load(same);
    EXPECT_EQ(log.text(), "");
  }
  const test::CapturedLog log;
  LRScheduler scheduler(resumed, CosineAnnealingLR(20));
  scheduler.load(other);
  EXPECT_NE(log.text().find("learning rate"), std::string::npos) << log.text();
  EXPECT_EQ(scheduler.get_last_lr()[0], LRSchedule(CosineAnnealingLR(20)).lr(0.4, 4));
}

// The rates in the optimizer's file are those of the saved run's schedule.
TEST(LRScheduler, FollowsTheProgramsScheduleIfTheOptimizerIsLoadedBeforeOrAfter) {
  auto saved_optimizer = two_groups<torch::optim::AdamW, torch::optim::AdamWOptions>();
  LRScheduler first(saved_optimizer, CosineAnnealingLR(10));
  for (int step = 0; step < 4; ++step) first.step();
  const LRSchedule schedule = CosineAnnealingLR(20);
  const auto rates = [&](std::int64_t step) {
    return std::vector<double>{schedule.lr(0.4, step), schedule.lr(0.1, step)};
  };
  for (const bool optimizer_first : {true, false}) {
    auto optimizer_file = saved(saved_optimizer);
    auto file = saved(first);
    auto resumed = two_groups<torch::optim::AdamW, torch::optim::AdamWOptions>();
    LRScheduler scheduler(resumed, schedule);
    if (optimizer_first) resumed.load(optimizer_file);
    scheduler.load(file);
    if (!optimizer_first) resumed.load(optimizer_file);
    EXPECT_EQ(lrs_of(resumed), optimizer_first ? rates(4) : lrs_of(saved_optimizer));
    const test::CapturedLog log;
    for (int step = 5; step < 8; ++step) {
      scheduler.step();
      EXPECT_EQ(lrs_of(resumed), rates(step));
    }
    EXPECT_EQ(scheduler.steps(), 7);
    EXPECT_EQ(log.text().find("load the optimizer first") == std::string::npos, optimizer_first)
        << log.text();
  }
}

TEST(LRScheduler, IsSavedAndLoadedAgainBeforeItsFirstStepAfterTheOptimizer) {
  auto optimizer = two_groups<torch::optim::AdamW, torch::optim::AdamWOptions>();
  LRScheduler first(optimizer, CosineAnnealingLR(10));
  for (int step = 0; step < 4; ++step) first.step();
  auto optimizer_file = saved(optimizer);
  auto file = saved(first);
  const LRSchedule schedule = CosineAnnealingLR(20);
  for (int run = 0; run < 3; ++run) {
    auto resumed = two_groups<torch::optim::AdamW, torch::optim::AdamWOptions>();
    LRScheduler scheduler(resumed, schedule);
    scheduler.load(file);
    resumed.load(optimizer_file);
    optimizer_file = saved(resumed);
    file = saved(scheduler);
    scheduler.step();
    EXPECT_EQ(lrs_of(resumed), (std::vector<double>{schedule.lr(0.4, 5), schedule.lr(0.1, 5)}));
  }
}

// As on a machine with another libm.
TEST(LRScheduler, ResumesWithRatesThatAreRoundedDifferently) {
  const auto rounded = [](double by) {
    return LambdaLR([by](std::int64_t step) { return by / static_cast<double>(1 + step); });
  };
  auto saved_optimizer = two_groups<torch::optim::AdamW, torch::optim::AdamWOptions>();
  LRScheduler first(saved_optimizer, rounded(1 + 1e-14));
  first.step();
  auto optimizer_file = saved(saved_optimizer);
  auto file = saved(first);
  auto resumed = two_groups<torch::optim::AdamW, torch::optim::AdamWOptions>();
  const test::CapturedLog log;
  LRScheduler scheduler(resumed, rounded(1));
  scheduler.load(file);
  resumed.load(optimizer_file);
  ASSERT_NE(lrs_of(resumed), scheduler.get_last_lr());
  scheduler.step();
  EXPECT_EQ(lrs_of(resumed), (std::vector<double>{0.4 / 3, 0.1 / 3}));
  EXPECT_EQ(log.text(), "");
}

TEST(LRScheduler, AcceptsNoRatesButThoseOfTheSavedRunAndThoseOnce) {
  auto optimizer = two_groups<torch::optim::AdamW, torch::optim::AdamWOptions>();
  LRScheduler first(optimizer, CosineAnnealingLR(10));
  for (int step = 0; step < 4; ++step) first.step();
  auto file = saved(first);
  auto resumed = two_groups<torch::optim::AdamW, torch::optim::AdamWOptions>();
  LRScheduler scheduler(resumed, CosineAnnealingLR(20));
  scheduler.load(file);
  const auto set = [&](const std::vector<double>& lrs) {
    for (std::size_t i = 0; i < lrs.size(); ++i) resumed.param_groups()[i].options().set_lr(lrs[i]);
  };
  const auto of_file = first.get_last_lr();
  set({of_file[0], 0.3});
  expect_error([&] { scheduler.step(); }, {"in group 0"});
  set({of_file[0], scheduler.get_last_lr()[1]});
  expect_error([&] { scheduler.step(); }, {"in group 0"});
  EXPECT_EQ(scheduler.steps(), 4);
  set(of_file);
  scheduler.step();
  set(of_file);
  expect_error([&] { scheduler.step(); }, {"in group 0"});
  EXPECT_EQ(scheduler.steps(), 5);
}

TEST(LRScheduler, RefusesFilesThatDoNotFitAndChangesNothing) {
  auto optimizer = two_groups<torch::optim::SGD, torch::optim::SGDOptions>();
  LRScheduler scheduler(optimizer, OneCycleLR(5));
  scheduler.step();
  const auto before = lrs_of(optimizer);
  const auto refused = [&](torch::serialize::InputArchive file) {
    const auto message = message_of<FileError>([&] { scheduler.load(file); });
    EXPECT_EQ(scheduler.steps(), 1);
    EXPECT_EQ(lrs_of(optimizer), before);
    return message;
  };
  const auto expect_part = [](const std::string& message, const std::string& part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  expect_part(refused(test::archived([](auto&) {})), "'steps'");

  torch::optim::SGD one({torch::zeros({1})}, torch::optim::SGDOptions(0.1));
  expect_part(refused(saved(LRScheduler(one, OneCycleLR(5)))), "2 parameter groups");

  auto longer_optimizer = two_groups<torch::optim::SGD, torch::optim::SGDOptions>();
  LRScheduler longer(longer_optimizer, OneCycleLR(20));
  for (int step = 0; step < 8; ++step) longer.step();
  expect_part(refused(saved(longer)), "a step from 0 to 5");
}

}  // namespace
}  // namespace semitone::optim
