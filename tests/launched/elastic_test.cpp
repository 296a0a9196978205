// A training on nodes that join and leave: `semitone launch` starts its processes, which resume
// from checkpoints. Each test controls how far elastic_program trains before the next node is lost
// or joins, so that the world size changes within an epoch.
#include "src/launch/ports.h"
#include "src/launch/process.h"
#include "tests/launched/elastic_run.h"
#include "tests/support/processes.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/types.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace semitone::test::elastic {
namespace {

namespace fs = std::filesystem;
using launch::Process;
using launch::ProcessOptions;
using testing::ElementsAre;
using testing::IsSupersetOf;

using Images = std::vector<std::int64_t>;
using History = std::map<std::int64_t, Images>;  // the images of each step, in ascending order

// One rank at the start of an attempt.
struct Start {
  int world_size = 0;
  std::int64_t step = 0;
  pid_t process = 0;
};

// A training in a folder.
class Training {
 public:
  explicit Training(fs::path folder) : folder_(std::move(folder)) {
    fs::create_directory(folder_);
    allow(0);
  }

  const fs::path& folder() const { return folder_; }

  void allow(std::int64_t steps) const {
    // In one step: a rank must not read a part of the number.
    write_text(folder_ / "next", std::to_string(steps));
    fs::rename(folder_ / "next", folder_ / kAllowed);
  }

  // The ranks that have started so far, in the order of their numbers.
  std::vector<Start> starts(int attempt) const {
    std::vector<Start> found;
    for (int rank = 0;; ++rank) {
      std::ifstream file(folder_ / started_file(attempt, rank));
      Start start;
      if (!(file >> start.world_size >> start.step >> start.process)) return found;
      found.push_back(start);
    }
  }

  // Waits until all ranks of an attempt have started. Returns whether they are that many.
  bool begins(int attempt, int ranks) const {
    const bool has_begun = eventually([&] {
      const std::vector<Start> all = starts(attempt);
      return !all.empty() && all.size() == static_cast<std::size_t>(all.front().world_size);
    });
    return has_begun && starts(attempt).front().world_size == ranks;
  }

  // Waits until a rank has begun a step.
  bool reaches(int attempt, int rank, std::int64_t step) const {
    return eventually([&] { return images(attempt, rank).contains(step); });
  }

  // What a rank has taken in an attempt.
  History images(int attempt, int rank) const {
    History steps;
    std::ifstream file(folder_ / images_file(attempt, rank));
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      std::int64_t step = 0;
      words >> step;
      for (std::int64_t image = 0; words >> image;) steps[step].push_back(image);
    }
    return steps;
  }

  // What all ranks have taken in an attempt.
  History images(int attempt) const {
    History all;
    for (std::size_t rank = 0; rank < starts(attempt).size(); ++rank) {
      for (const auto& [step, taken] : images(attempt, static_cast<int>(rank)))
        all[step].insert(all[step].end(), taken.begin(), taken.end());
    }
    for (auto& [step, taken] : all) std::ranges::sort(taken);
    return all;
  }

  // The steps that count for the final weights. The steps of an attempt after the checkpoint from
  // which the next attempt continues are lost, and repeated.
  History history(int attempts) const {
    History steps;
    for (int attempt = 0; attempt < attempts; ++attempt) {
      steps.erase(steps.upper_bound(starts(attempt).front().step), steps.end());
      for (const auto& [step, taken] : images(attempt)) steps[step] = taken;
    }
    return steps;
  }

  std::vector<at::Tensor> weights() const {
    std::vector<at::Tensor> all;
    torch::load(all, (folder_ / kWeights).string());
    return all;
  }

 private:
  fs::path folder_;
};

class ElasticTraining : public ::testing::Test {
 protected:
  ElasticTraining() { adopt_orphans(); }

  // The launcher of a node. Its output is this test's, where a failure is to be seen.
  Process node(const Training& run) const {
    return Process(ProcessOptions(SEMITONE_PROGRAM)
                       .arguments({"launch", "--nnodes", "1:2", "--rdzv-endpoint", endpoint_,
                                   "--max-restarts", "1", "--last-call", "0.2",
                                   SEMITONE_ELASTIC_PROGRAM, run.folder().string()}));
  }

  // Trains in one process without a launcher.
  void train_alone(const Training& run) const {
    run.allow(kSteps);
    const auto alone =
        launch::run(ProcessOptions(SEMITONE_ELASTIC_PROGRAM).arguments({run.folder().string()}));
    ASSERT_TRUE(alone.status.success()) << alone.status.to_string();
  }

  const std::string endpoint_ = "127.0.0.1:" + std::to_string(launch::free_port());
  TemporaryFolder folder_;
};

// All images of an epoch, in ascending order.
Images images_of_epoch(const History& steps, std::int64_t epoch) {
  Images all;
  for (std::int64_t step = 1; step <= kStepsPerEpoch; ++step) {
    const Images& more = steps.at(epoch * kStepsPerEpoch + step);
    all.insert(all.end(), more.begin(), more.end());
  }
  std::ranges::sort(all);
  return all;
}

TEST_F(ElasticTraining, TakesEachImageOnceInAnEpochWhileNodesComeAndGo) {
  const Training run(folder_ / "elastic");
  Process first = node(run);
  ASSERT_TRUE(run.begins(0, 1));
  Process second = node(run);
  ASSERT_TRUE(run.begins(1, 2));

  // The second node is lost while the first one waits for its gradients. Everything on a node is
  // lost at once: its launcher does not report the end of the rank, and the rank does not get the
  // SIGTERM that the end of its launcher causes.
  run.allow(8);
  ASSERT_TRUE(run.reaches(1, 1, 8) && run.reaches(1, 0, 9));
  const pid_t lost = run.starts(1).at(1).process;
  second.send(SIGSTOP);
  ::kill(lost, SIGKILL);
  EXPECT_TRUE(eventually([&] { return !is_running(lost); }));
  second.send(SIGKILL);
  EXPECT_EQ(second.wait().status.signal, SIGKILL);

  ASSERT_TRUE(run.begins(2, 1));
  run.allow(14);
  ASSERT_TRUE(run.reaches(2, 0, 14));
  Process third = node(run);
  ASSERT_TRUE(run.begins(3, 2));
  run.allow(kSteps);
  EXPECT_TRUE(first.wait().status.success());
  EXPECT_TRUE(third.wait().status.success());
  EXPECT_TRUE(no_process_is_left());
  EXPECT_TRUE(run.starts(4).empty());

  // Attempts 1 and 3 continue from the checkpoint that the ranks saved when a node joined. Attempt
  // 2 continues from the last checkpoint before the loss of a node, and repeats steps 7 and 8.
  EXPECT_EQ(run.starts(0).front().step, 0);
  EXPECT_EQ(run.starts(1).front().step, 1);
  EXPECT_EQ(run.starts(2).front().step, 6);
  const std::int64_t grown = run.starts(3).front().step;
  EXPECT_GE(grown, 14);
  EXPECT_LT(grown, kStepsPerEpoch);
  const History before = run.images(1);
  const History again = run.images(2);
  for (const std::int64_t step : {7, 8}) EXPECT_EQ(again.at(step), before.at(step));
  // Of step 9 only rank 0 had taken its part.
  EXPECT_EQ(before.at(9).size(), kBatch / 2);
  EXPECT_THAT(again.at(9), IsSupersetOf(before.at(9)));

  const History steps = run.history(4);
  ASSERT_EQ(steps.size(), static_cast<std::size_t>(kSteps));
  Images each(kImages);
  std::iota(each.begin(), each.end(), 0);
  for (const std::int64_t epoch : {0, 1}) EXPECT_EQ(images_of_epoch(steps, epoch), each);

  // Nor does it change the images of any step, and the weights differ by the rounding of sums only.
  const Training undisturbed(folder_ / "undisturbed");
  train_alone(undisturbed);
  EXPECT_EQ(steps, undisturbed.history(1));
  EXPECT_TRUE(near(run.weights(), undisturbed.weights(), 1e-12));
}

}  // namespace
}  // namespace semitone::test::elastic
