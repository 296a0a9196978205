// A scheduler in a training with skipped steps, which is interrupted and resumed.

#include "semitone/optim/lr_scheduler.h"

#include "semitone/checkpoint/checkpoint.h"
#include "tests/checkpoint/training.h"
#include "tests/support/temporary_folder.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <vector>

namespace semitone::checkpoint::lr_scheduler_test {
namespace {

using test::Setting;
using test::Training;

struct Scheduled {
  explicit Scheduled(const std::filesystem::path& folder)
      : scheduler(*training.optimizer,
                  optim::SequentialLR({optim::LinearLR(4), optim::OneCycleLR(20)}, {4})),
        checkpoint(training.checkpoint(folder)) {
    checkpoint.add("scheduler", scheduler);
  }

  // Trains until `end`, where the gradients of some steps overflow.
  void train_to(std::int64_t end) {
    while (training.step < end) {
      const auto skipped = training.mixed.skipped_steps();
      training.train_to(training.step + 1);
      if (training.mixed.skipped_steps() == skipped) scheduler.step();
    }
  }

  Training training{Setting{}};
  optim::LRScheduler scheduler;
  Checkpoint checkpoint;
};

TEST(ScheduledTraining, ResumesBitForBitAndDoesNotCountSkippedSteps) {
  const semitone::test::TemporaryFolder folder;
  Scheduled whole(folder.path() / "whole");
  whole.train_to(14);
  EXPECT_GE(whole.training.mixed.skipped_steps(), 2);
  EXPECT_EQ(whole.scheduler.steps(), 14 - whole.training.mixed.skipped_steps());
  for (const std::int64_t stop : {3, 9}) {
    const auto path = folder.path() / std::to_string(stop);
    {
      Scheduled first(path);
      first.train_to(stop);
      first.checkpoint.save(stop);
    }
    Scheduled second(path);
    second.training.step = second.checkpoint.resume().value();
    second.train_to(14);
    EXPECT_EQ(second.scheduler.steps(), whole.scheduler.steps());
    EXPECT_EQ(second.scheduler.get_last_lr(), whole.scheduler.get_last_lr());
    EXPECT_TRUE(semitone::test::same_bits(second.training.state(), whole.training.state()));
  }
}

}  // namespace
}  // namespace semitone::checkpoint::lr_scheduler_test
