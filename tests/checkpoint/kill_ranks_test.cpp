// A data-parallel training whose ranks are killed with SIGKILL, or frozen with SIGSTOP, half of the
// times at random moments and half while it saves, and which the launcher restarts.
//
// SEMITONE_TEST_KILLS sets the number of kills for each setting. Default: 2.

#include "semitone/checkpoint.h"
#include "semitone/comm/init.h"
#include "semitone/launch/launcher.h"
#include "tests/checkpoint/data_parallel_training.h"
#include "tests/support/killed_trainings.h"
#include "tests/support/processes.h"
#include "tests/support/temporary_folder.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

namespace semitone::checkpoint::test {
namespace {

namespace fs = std::filesystem;
using semitone::test::last_number;
using semitone::test::partial_directories;
using semitone::test::read_text;
using semitone::test::same_bits;
using semitone::test::TemporaryFolder;

// Set for the ranks.
constexpr auto kFolderVariable = "SEMITONE_TEST_FOLDER";
constexpr auto kRun = "SEMITONE_TEST_RUN";
constexpr auto kEnd = "SEMITONE_TEST_END";
// In that folder: processes that outlived their attempt.
constexpr auto kLeft = "left";
constexpr auto kCheckpoints = "run";

struct KillSetting {
  const char* name;
  DataParallelSetting training;
  int signal = SIGKILL;
};

const std::vector<KillSetting>& settings() {
  static const std::vector<KillSetting> all = {
      {"O0", {.level = "O0"}},
      {"O1", {.level = "O1", .dtype = torch::kHalf}},
      {"O1-frozen", {.level = "O1", .dtype = torch::kHalf}, SIGSTOP},
      {"O1-sharded", {.level = "O1", .sharded = true}},
      {"O2-fp16", {.level = "O2", .dtype = torch::kHalf}},
      {"O2-bf16", {.level = "O2"}},
      {"O2-split", {.level = "O2", .split_master = true}},
      {"O2-sharded-fp16", {.level = "O2", .dtype = torch::kHalf, .sharded = true}},
      {"O2-sharded-split", {.level = "O2", .sharded = true, .split_master = true}},
      {"O3-fp16", {.level = "O3", .dtype = torch::kHalf}},
      {"O3-bf16", {.level = "O3"}}};
  return all;
}

std::string variable(const char* name, const char* otherwise = "") {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

fs::path result_of(const fs::path& folder, int rank) {
  return folder / ("rank" + std::to_string(rank) + ".pt");
}

fs::path processes_of(const fs::path& folder, int attempt) {
  return folder / ("processes" + std::to_string(attempt));
}

void append(const fs::path& file, pid_t process) {
  std::ofstream(file, std::ios::app) << std::to_string(process) + "\n";
}

// Records this process, and which processes of the previous attempt are left.
void check_in(const fs::path& folder, int attempt) {
  append(processes_of(folder, attempt), ::getpid());
  for (const pid_t process : semitone::test::ids_in(processes_of(folder, attempt - 1))) {
    if (semitone::test::is_running(process)) append(folder / kLeft, process);
  }
}

// After each kill the launcher waited until both ranks had ended, and after the last attempt
// nothing is left that it or a rank has started.
void expect_no_process_left(const fs::path& folder, int attempts) {
  for (int attempt = 0; attempt < attempts; ++attempt)
    EXPECT_EQ(semitone::test::ids_in(processes_of(folder, attempt)).size(), 2U) << attempt;
  EXPECT_FALSE(fs::exists(folder / kLeft)) << read_text(folder / kLeft);
  EXPECT_TRUE(semitone::test::no_process_is_left());
}

// Kills or freezes this rank after a random time if it is its turn: rank 0, rank 1, or both. If
// both froze, no rank would notice. In half of the turns it waits for a save, and interrupts it.
void signal_soon(const fs::path& checkpoints, int signal, int turn, int rank) {
  const int victim = turn % (signal == SIGSTOP ? 2 : 3);
  if (victim != 2 && victim != rank) return;
  const bool in_a_save = turn % 6 < 3;  // so that each victim, and each way to save, has both
  const auto generator =
      at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(turn * 2 + rank));
  const auto delay = torch::randint(250'000, {1}, generator, torch::kLong).item<std::int64_t>();
  std::thread([checkpoints, signal, delay, in_a_save] {
    std::this_thread::sleep_for(std::chrono::microseconds(delay));
    while (in_a_save && partial_directories(checkpoints) == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    ::kill(::getpid(), signal);
  }).detach();
}

// Trains and saves until it is killed, or in the last attempt for a few steps more. Alternates
// between the two ways to save. Says what it finds, and which steps it has saved.
void train(const fs::path& folder) {
  torch::set_num_threads(1);
  const int attempt = std::stoi(variable("TORCHELASTIC_RESTART_COUNT"));
  check_in(folder, attempt);
  const KillSetting& setting = settings().at(std::stoul(variable(kRun)));
  comm::InitOptions options;
  if (setting.signal == SIGSTOP) options.heartbeat_timeout(std::chrono::seconds(4));
  const auto group = comm::init("env://", options);
  const bool is_last = attempt == std::stoi(variable("TORCHELASTIC_MAX_RESTARTS"));
  DataParallelTraining run(group, 1, setting.training);
  const fs::path checkpoints = folder / kCheckpoints;
  if (group.rank() == 0) std::cout << "partial " << partial_directories(checkpoints) << std::endl;
  auto checkpoint = run.checkpoint(checkpoints);
  run.step = checkpoint.resume().value_or(0);
  std::cout << "resumed " << run.step << std::endl;
  const std::string end = variable(kEnd);
  const std::int64_t last = end.empty() ? run.step + 3 : std::stoll(end);
  // Rank 0, rank 1 and both in turn.
  const int turn = attempt + std::stoi(variable(kRun));
  if (!is_last) signal_soon(checkpoints, setting.signal, turn, group.rank());
  while (!is_last || run.step < last) {
    run.train_to(run.step + 1);
    if (attempt % 2 == 0) {
      checkpoint.save(run.step);
      std::cout << "saved " << run.step << std::endl;
    } else {
      checkpoint.save_async(run.step);  // and has written the one before, if there was one
      std::cout << "saved " << run.step - 1 << std::endl;
    }
  }
  checkpoint.wait();
  std::vector<at::Tensor> result = run.state();
  result.push_back(torch::tensor({run.step}));
  torch::save(result, result_of(folder, group.rank()).string());
}

// No attempt resumed from an earlier step than one that was saved before, nor found damage. (A
// training that has lost a checkpoint repeats its steps, and ends with the same bits.) Returns how
// many saves were interrupted.
std::int64_t expect_no_save_lost(const fs::path& logs, int attempts) {
  std::int64_t saved = 0;
  std::int64_t interrupted = 0;
  for (int attempt = 0; attempt < attempts; ++attempt) {
    SCOPED_TRACE("attempt " + std::to_string(attempt));
    std::int64_t resumed = -1;  // one of the ranks may be killed before it says so
    std::int64_t last = -1;
    for (const char* const rank : {"0", "1"}) {
      const fs::path log = logs / ("attempt_" + std::to_string(attempt)) / rank;
      const std::string output = read_text(log / "stdout.log");
      resumed = std::max(resumed, last_number(output, "resumed"));
      // No rank returns from a save before the checkpoint is complete.
      last = std::max(last, last_number(output, "saved"));
      interrupted += std::max<std::int64_t>(last_number(output, "partial"), 0);
      EXPECT_THAT(read_text(log / "stderr.log"), testing::Not(testing::HasSubstr("damaged")));
    }
    EXPECT_GE(resumed, saved);
    saved = std::max(resumed, last);
  }
  return interrupted;
}

// Returns what the ranks saved at their end. Counts the saves that were interrupted.
std::vector<std::vector<at::Tensor>> launch(const fs::path& folder, int kills,
                                            std::int64_t& interrupted) {
  ::setenv(kFolderVariable, folder.c_str(), 1);
  fs::create_directory(folder);
  const auto options = launch::LaunchOptions("/proc/self/exe")
                           .arguments({"--gtest_filter=KilledRanks.*", "--gtest_brief=1"})
                           .nproc_per_node(2)
                           .max_restarts(kills)
                           .grace(launch::LaunchOptions::Seconds(1))
                           .log_dir(folder / "logs")
                           .redirects(launch::StreamsByRank(launch::Streams::both));
  const launch::LaunchResult result = launch::Launcher(options).run();
  ::unsetenv(kFolderVariable);
  expect_no_process_left(folder, kills + 1);
  EXPECT_EQ(result.outcome, launch::LaunchOutcome::succeeded) << result.reason;
  EXPECT_EQ(result.restarts, kills);
  interrupted += expect_no_save_lost(folder / "logs" / result.run_id, kills + 1);
  std::vector<std::vector<at::Tensor>> states(2);
  for (int rank = 0; rank < 2 && result.exit_code() == 0; ++rank)
    torch::load(states[static_cast<std::size_t>(rank)], result_of(folder, rank).string());
  return states;
}

TEST(KilledRanks, EndAsIfTheyHadNotBeenKilled) {
  if (const std::string mine = variable(kFolderVariable); !mine.empty()) return train(mine);
  const int kills = std::stoi(variable("SEMITONE_TEST_KILLS", "2"));
  semitone::test::adopt_orphans();
  const TemporaryFolder folder;
  std::int64_t interrupted = 0;
  for (std::size_t run = 0; run < settings().size(); ++run) {
    const std::string name = settings()[run].name;
    SCOPED_TRACE(name);
    ::setenv(kRun, std::to_string(run).c_str(), 1);
    const auto killed = launch(folder / (name + "-killed"), kills, interrupted);
    ASSERT_FALSE(killed.front().empty());
    const auto steps = killed.front().back().item<std::int64_t>();
    ::setenv(kEnd, std::to_string(steps).c_str(), 1);
    const auto undisturbed = launch(folder / (name + "-undisturbed"), 0, interrupted);
    ::unsetenv(kEnd);
    for (std::size_t rank = 0; rank < killed.size(); ++rank)
      EXPECT_TRUE(same_bits(killed[rank], undisturbed[rank]));
  }
  RecordProperty("interrupted_writes", std::to_string(interrupted));
  // So that the test tests something. Of all settings: each has two kills only.
  EXPECT_GT(interrupted, 0);
}

}  // namespace
}  // namespace semitone::checkpoint::test
