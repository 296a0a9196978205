#include "tests/support/run_ranks.h"

#include "src/net/sockets.h"
#include "tests/support/temporary_folder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

namespace semitone::test {
namespace {

// Set for the processes that are ranks.
constexpr auto kFolderVariable = "SEMITONE_TEST_FOLDER";
constexpr auto kRankVariable = "SEMITONE_TEST_RANK";
constexpr auto kReport = "@@ ";

[[noreturn]] void be_a_rank(const std::string& number, int count, const std::string& folder,
                            const std::function<void(Rank&)>& body) {
  Rank rank(std::stoi(number), count, folder);
  try {
    body(rank);
  } catch (const std::exception& error) {
    ADD_FAILURE() << "rank " << rank.number() << " threw: " << error.what();
  }
  std::cout.flush();
  std::fflush(nullptr);
  std::exit(::testing::Test::HasFailure() ? 1 : 0);
}

std::vector<std::string> reports_in(const std::string& output) {
  std::vector<std::string> reports;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind(kReport, 0) == 0) reports.push_back(line.substr(std::string(kReport).size()));
  }
  return reports;
}

launch::ProcessOptions process_of(int rank, int count, int port, const std::string& folder,
                                  const RankOptions& options) {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  const std::string ranks = std::to_string(count);
  launch::ProcessOptions process("/proc/self/exe");
  process
      .arguments({std::string("--gtest_filter=") + test->test_suite_name() + "." + test->name(),
                  "--gtest_brief=1"})
      .environment(kFolderVariable, folder)
      .environment(kRankVariable, std::to_string(rank))
      .environment("RANK", std::to_string(rank))
      .environment("WORLD_SIZE", ranks)
      .environment("LOCAL_RANK", std::to_string(rank))
      .environment("LOCAL_WORLD_SIZE", ranks)
      .environment("MASTER_ADDR", "127.0.0.1")
      .environment("MASTER_PORT", std::to_string(port))
      // As torchrun does: threads of several processes that compete for cores slow all of them
      // down.
      .environment("OMP_NUM_THREADS", "1")
      // On the CPU, and so over Gloo, wherever the tests run.
      .environment("CUDA_VISIBLE_DEVICES", "-1")
      .out(launch::Output::capture)
      .err(launch::Output::capture)
      .death_signal(SIGKILL);
  for (const auto& [name, value] : options.environment) process.environment(name, value);
  return process;
}

}  // namespace

void Rank::report(const std::string& text) const {
  std::cout << kReport + text + "\n" << std::flush;
}

std::vector<RankResult> run_ranks(int count, const std::function<void(Rank&)>& body,
                                  const RankOptions& options) {
  if (const char* folder = std::getenv(kFolderVariable)) {
    be_a_rank(std::getenv(kRankVariable), count, folder, body);
  }
  const TemporaryFolder folder;
  // Free a moment ago.
  const int port = net::address_of(net::listen_on({"127.0.0.1", 0}).value).port;
  std::vector<launch::Process> processes;
  for (int rank = 0; rank < count; ++rank) {
    processes.emplace_back(process_of(rank, count, port, folder.path().string(), options));
  }
  std::vector<pid_t> ids;
  for (const launch::Process& process : processes) ids.push_back(process.id());

  const auto is_casualty = [&](int rank) {
    return std::count(options.casualties.begin(), options.casualties.end(), rank) > 0;
  };
  std::mutex mutex;
  std::condition_variable ended;
  std::set<int> running;
  for (int rank = 0; rank < count; ++rank) running.insert(rank);
  std::vector<RankResult> results(static_cast<std::size_t>(count));
  std::vector<std::thread> waiters;
  for (int rank = 0; rank < count; ++rank) {
    waiters.emplace_back([&, rank] {
      const auto index = static_cast<std::size_t>(rank);
      const launch::ProcessResult finished = processes[index].wait();
      const std::lock_guard lock(mutex);
      results[index] = {finished.status, reports_in(finished.out), finished.out + finished.err};
      running.erase(rank);
      ended.notify_all();
    });
  }
  bool in_time = true;
  {
    std::unique_lock lock(mutex);
    in_time = ended.wait_for(lock, options.timeout, [&] {
      return std::all_of(running.begin(), running.end(), is_casualty);
    });
    for (const int rank : running) {
      if (!is_casualty(rank)) ADD_FAILURE() << "rank " << rank << " did not end in time";
      ::kill(ids[static_cast<std::size_t>(rank)], SIGKILL);
    }
  }
  for (std::thread& waiter : waiters) waiter.join();
  for (int rank = 0; rank < count; ++rank) {
    const RankResult& result = results[static_cast<std::size_t>(rank)];
    if ((result.status.success() || is_casualty(rank)) && in_time) continue;
    ADD_FAILURE() << "rank " << rank << ": " << result.status.to_string() << "\n" << result.output;
  }
  return results;
}

}  // namespace semitone::test
