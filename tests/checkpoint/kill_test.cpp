// A training that is killed with SIGKILL at random moments, most of them while it saves.
//
// SEMITONE_TEST_KILLS sets the number of kills. Default: 50.

#include "semitone/checkpoint.h"
#include "src/launch/process.h"
#include "tests/checkpoint/training.h"
#include "tests/support/killed_trainings.h"
#include "tests/support/processes.h"
#include "tests/support/temporary_folder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <string>
#include <thread>

namespace semitone::checkpoint::test {
namespace {

namespace fs = std::filesystem;
using semitone::test::last_number;
using semitone::test::partial_directories;
using semitone::test::TemporaryFolder;

// Set for the processes that are killed.
constexpr auto kFolder = "SEMITONE_TEST_FOLDER";
constexpr auto kReady = "ready";

int number_of_kills() {
  const char* const kills = std::getenv("SEMITONE_TEST_KILLS");
  return kills == nullptr ? 50 : std::stoi(kills);
}

// Each run of the test has another setting.
Setting setting_of(int kill) {
  constexpr const char* kLevels[] = {"O0", "O1", "O2", "O3"};
  return {.level = kLevels[kill % 4],
          .dtype = kill % 8 < 4 ? torch::kHalf : torch::kBFloat16,
          .optimizer = kOptimizers[static_cast<std::size_t>(kill / 2 % 4)]};
}

// Resumes, says so, and trains and saves until it is killed.
[[noreturn]] void train_until_killed(const fs::path& folder, const Setting& setting,
                                     bool asynchronous) {
  Training run(setting);
  auto checkpoint = run.checkpoint(folder / "run");
  const auto resumed = checkpoint.resume();
  run.step = resumed.value_or(0);
  std::cout << "resumed " << resumed.value_or(-1) << std::endl;
  semitone::test::write_text(folder / kReady, "");
  while (true) {
    run.train_to(run.step + 1);
    if (asynchronous) {
      checkpoint.save_async(run.step);  // and has written the one before, if there was one
      if (run.step > 1) std::cout << "saved " << run.step - 1 << std::endl;
    } else {
      checkpoint.save(run.step);
      std::cout << "saved " << run.step << std::endl;
    }
  }
}

launch::ProcessOptions child_in(const fs::path& folder) {
  launch::ProcessOptions child("/proc/self/exe");
  child.arguments({"--gtest_filter=KilledTraining.*", "--gtest_brief=1"})
      .environment(kFolder, folder.string())
      .environment("OMP_NUM_THREADS", "1")
      .out(launch::Output::capture)
      .err(launch::Output::capture)
      .death_signal(SIGKILL);
  return child;
}

// Starts the training, and kills it after the delay. Returns its output.
std::string run_and_kill(const fs::path& folder, std::chrono::microseconds delay) {
  fs::remove(folder / kReady);
  launch::Process child(child_in(folder));
  const auto limit = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!fs::exists(folder / kReady) && std::chrono::steady_clock::now() < limit)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(fs::exists(folder / kReady));
  std::this_thread::sleep_for(delay);
  child.send(SIGKILL);
  const launch::ProcessResult result = child.wait();
  EXPECT_FALSE(result.status.success());
  EXPECT_EQ(result.err, "");  // no warning: no checkpoint was damaged
  EXPECT_TRUE(semitone::test::no_process_is_left());
  return result.out;
}

// The survivor of the kills ends like a training that was not killed.
void expect_undisturbed(const Setting& setting, const fs::path& folder, std::int64_t saved) {
  Training survivor(setting);
  auto checkpoint = survivor.checkpoint(folder);
  const std::int64_t step = checkpoint.resume().value_or(0);
  ASSERT_GE(step, saved);
  survivor.step = step;
  survivor.train_to(step + 3);
  checkpoint.save(survivor.step);
  EXPECT_EQ(partial_directories(folder), 0);
  Training undisturbed(setting);
  undisturbed.train_to(step + 3);
  EXPECT_TRUE(same_bits(survivor.state(), undisturbed.state()));
}

TEST(KilledTraining, EndsAsIfItHadNotBeenKilled) {
  torch::set_num_threads(1);
  const int kills = number_of_kills();
  const char* const mine = std::getenv(kFolder);
  if (mine != nullptr) {
    const int number = std::stoi(fs::path(mine).filename().string());
    train_until_killed(mine, setting_of(number), number % 2 == 1);
  }
  semitone::test::adopt_orphans();
  const TemporaryFolder folder;
  // Microseconds.
  const at::Tensor delays =
      torch::randint(150'000, {kills}, at::make_generator<at::CPUGeneratorImpl>(5), torch::kLong);
  std::int64_t interrupted = 0;
  constexpr int kRuns = 8;
  for (int number = 0; number < kRuns; ++number) {
    const Setting setting = setting_of(number);
    SCOPED_TRACE(testing::PrintToString(setting));
    const fs::path own = folder / std::to_string(number);
    fs::create_directory(own);
    std::int64_t saved = -1;
    for (int kill = number; kill < kills; kill += kRuns) {
      const std::string output =
          run_and_kill(own, std::chrono::microseconds(delays[kill].item<std::int64_t>()));
      ASSERT_GE(last_number(output, "resumed"), saved) << output;
      saved = std::max({saved, last_number(output, "resumed"), last_number(output, "saved")});
      interrupted += partial_directories(own / "run");
    }
    expect_undisturbed(setting, own / "run", saved);
  }
  RecordProperty("kills", kills);
  RecordProperty("interrupted_writes", std::to_string(interrupted));
  EXPECT_GT(interrupted, 0);  // so that the test tests something
}

}  // namespace
}  // namespace semitone::checkpoint::test
