#pragma once

#include "semitone/launch/exit_status.h"

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

// Tests with several real processes.
//
//     TEST(Group, AddsUp) {
//       run_ranks(4, [](Rank& rank) {
//         const comm::Group group = comm::init();
//         …
//         EXPECT_EQ(…);
//       });
//     }
//
// Each rank is a process that starts the test from its beginning, with the variables that torchrun
// sets. In these processes the call of run_ranks runs the body, and ends the process. In the original
// process it waits for all, and the test fails, with the rank's output, if an expectation failed in
// one of them.
//
// Ranks are copies that the program makes of itself before its tests begin. A program that links
// LibTorch takes 0.3 s to load, which would be most of the time of such tests.
namespace semitone::test {

// In the body: describes the process's own rank.
class Rank {
 public:
  Rank(int number, int count, std::filesystem::path folder)
      : number_(number), count_(count), folder_(std::move(folder)) {}

  int number() const { return number_; }
  int count() const { return count_; }

  // An empty folder that all ranks share.
  const std::filesystem::path& folder() const { return folder_; }

  // Passes a string to the test: RankResult::reports.
  void report(const std::string& text) const;

  // Returns when all ranks have called it as often. Without it, a rank that a test ends too early is
  // lost to what the others still do: comm::init() and collectives end at different times.
  void meet();

 private:
  int meetings_ = 0;
  int number_;
  int count_;
  std::filesystem::path folder_;
};

struct RankResult {
  launch::ExitStatus status;
  std::vector<std::string> reports;
  std::string output;  // all it wrote
};

struct RankOptions {
  // All ranks are killed, and the test fails, if they take longer.
  std::chrono::seconds timeout = std::chrono::seconds(120);
  // Ranks that do not end properly, and whose end is not waited for: they are killed when all
  // others have ended.
  std::vector<int> casualties = {};
};

// One call in each test, before anything that not all ranks need to do.
std::vector<RankResult> run_ranks(int count, const std::function<void(Rank&)>& body,
                                  const RankOptions& options = {});

}  // namespace semitone::test
