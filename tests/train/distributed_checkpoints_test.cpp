// Checkpoints of several processes: another number of them, signals and mistakes.

#include "semitone/comm/init.h"
#include "src/checkpoint/folder.h"
#include "tests/support/errors.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temporary_folder.h"
#include "tests/train/distributed_training.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstddef>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

namespace semitone::train {
namespace distributed {
namespace {

using amp::OptLevel;
using test::Rank;
using test::run_ranks;

std::filesystem::path own_folder(const Rank& rank, const std::string& name) {
  return rank.folder() / (name + std::to_string(rank.number()));
}

// Half as many processes with batches twice as large, and the reverse: each step has the same images.
TEST(DistributedCheckpoints, AnotherNumberOfProcessesContinuesWithTheSameImages) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Models models(0);
    const auto alone = [&](std::int64_t steps) {
      return options_for(OptLevel::O0, comm::Group()).batch_size(16).max_steps(steps);
    };
    const auto together = [&](std::int64_t steps) {
      return options_for(OptLevel::O0, group).sync_batch_norm(true).max_steps(steps);
    };
    Losses whole;
    const auto expected = train_classifier(
        models.factory(), data(), alone(20).checkpoint_dir(own_folder(rank, "alone")), whole);
    train_classifier(models.factory(), data(),
                     together(10).checkpoint_dir(rank.folder() / "together"));
    const auto expect_rest = [&](const std::vector<double>& losses, double train_loss) {
      ASSERT_EQ(losses.size(), 10U);
      for (std::size_t i = 0; i < 10; ++i)
        EXPECT_TRUE(std::abs(losses[i] - whole.values[10 + i]) <= 1e-4) << "step " << 10 + i;
      EXPECT_TRUE(std::abs(train_loss - expected.train_loss) <= 1e-4) << train_loss;
    };
    // From two processes to one.
    Losses rest;
    const auto resumed = train_classifier(
        models.factory(), data(),
        alone(20).sync_batch_norm(true).resume_from(rank.folder() / "together"), rest);
    expect_rest(rest.values, resumed.train_loss);
    // From one to two.
    const auto one = rank.folder() / "one";
    if (group.rank() == 0) {
      train_classifier(models.factory(), data(),
                       alone(10).sync_batch_norm(true).checkpoint_dir(one));
    }
    group.barrier();
    Losses mine;
    const auto shared =
        train_classifier(models.factory(), data(), together(20).resume_from(one), mine);
    at::Tensor means = torch::tensor(mine.values, torch::kDouble);
    group.all_reduce(means, comm::ReduceOp::mean);
    expect_rest({means.data_ptr<double>(), means.data_ptr<double>() + means.numel()},
                shared.train_loss);
    // With the same batches for each process, epochs would have another number of steps.
    test::expect_error(
        [&] {
          train_classifier(models.factory(), data(), together(20).batch_size(16).resume_from(one));
        },
        {"[checkpoint.resume]", "images per step 32", "got images per step 16"});
  });
}

// Makes a weight NaN in step 20, which is then saved.
struct Ruin : Losses {
  using Losses::on;
  void on(const TrainingBegins& begin) override { model = &begin.model; }
  void on(const StepDone& step) override {
    Losses::on(step);
    const at::NoGradGuard no_grad;
    if (step.step == 20)
      model->parameters().front().fill_(std::numeric_limits<double>::quiet_NaN());
  }
  void on(const RolledBack& rolled_back) override { rollbacks.push_back(rolled_back); }
  const torch::nn::Module* model = nullptr;
  std::vector<RolledBack> rollbacks;
};

TEST(DistributedCheckpoints, ARollbackMayGoBackToAnotherNumberOfProcesses) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Models models(0);
    const auto run = rank.folder() / "run";
    const auto options = [&](const comm::Group& of, std::int64_t steps) {
      return options_for(OptLevel::O0, of)
          .sync_batch_norm(true)
          .checkpoint_dir(run)
          .max_steps(steps);
    };
    train_classifier(models.factory(), data(), options(group, 10));
    if (group.rank() > 0) return;
    Ruin ruin;
    const auto result =
        train_classifier(models.factory(), data(),
                         options(comm::Group(), 30)
                             .batch_size(16)
                             .resume_auto(true)
                             .save_every({.steps = 10})
                             .divergence_guard(amp::DivergenceGuardOptions().max_loss_ratio(1000))
                             .on_spike(OnSpike::rollback),
                         ruin);
    ASSERT_EQ(ruin.rollbacks.size(), 1U);
    EXPECT_EQ(ruin.rollbacks[0].step, 20);
    EXPECT_EQ(ruin.rollbacks[0].saved, 10);
    EXPECT_EQ(result.steps, 30);
  });
}

// A signal that one process gets, and the clock of the first one.
TEST(DistributedCheckpoints, StopsAndSavesOnAllProcessesAtTheSameStep) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Models models(0.2);
    const auto options = [&] {
      return options_for(OptLevel::O1, group).epochs(1'000'000).schedule(Schedule::constant);
    };
    const auto signalled = rank.folder() / "signalled";
    int calls = 0;
    const auto stopped = train_classifier(models.factory(), data(),
                                          options().checkpoint_dir(signalled).stop_signal([&] {
                                            return group.rank() == 1 && ++calls == 3 ? SIGTERM : 0;
                                          }));
    EXPECT_EQ(stopped.stop_signal, SIGTERM);
    EXPECT_EQ(group.broadcast(std::to_string(stopped.steps)), std::to_string(stopped.steps));
    const auto continued = train_classifier(
        models.factory(), data(),
        options().checkpoint_dir(signalled).resume_auto(true).max_steps(stopped.steps + 5));
    EXPECT_EQ(continued.steps, stopped.steps + 5);

    const auto timed = rank.folder() / "timed";
    const auto saved = train_classifier(
        models.factory(), data(),
        options()
            .checkpoint_dir(timed)
            .save_every({.time = std::chrono::seconds(1)})
            .stop_signal([&] {
              return !checkpoint::steps_in(timed).empty() && group.rank() == 1 ? SIGUSR1 : 0;
            }));
    EXPECT_EQ(saved.stop_signal, SIGUSR1);
    EXPECT_EQ(checkpoint::steps_in(timed).back(), saved.steps);
    EXPECT_GE(checkpoint::steps_in(timed).size(), 2U);
  });
}

TEST(DistributedCheckpoints, MistakesAreErrorsOnAllProcesses) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Models models(0);
    const auto options = [&] { return options_for(OptLevel::O0, group).max_steps(2); };
    const auto run = rank.folder() / "run";
    train_classifier(models.factory(), data(), options().checkpoint_dir(run));
    test::expect_error(
        [&] { train_classifier(models.factory(), data(), options().checkpoint_dir(run)); },
        {"no checkpoint of another run", "--resume auto"});
    test::expect_error(
        [&] {
          train_classifier(models.factory(), data(), options().resume_from(rank.folder() / "none"));
        },
        {"none", "No such file"});
    if (rank.number() == 0) test::write_text(rank.folder() / "file", "");
    group.barrier();
    test::expect_error(
        [&] {
          train_classifier(models.factory(), data(),
                           options().checkpoint_dir(rank.folder() / "file"));
        },
        {"Not a directory"});
  });
}

}  // namespace
}  // namespace distributed
}  // namespace semitone::train
