// That a checkpoint is on the disk before it has its name. No test can cut the power: the calls of
// a child process are recorded instead (recorded_files.cpp), and their order is checked.

#include "semitone/checkpoint.h"
#include "semitone/weights/file.h"
#include "src/launch/process.h"
#include "tests/checkpoint/training.h"
#include "tests/support/temporary_folder.h"

#include <torch/torch.h>

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace semitone::checkpoint::test {
namespace {

namespace fs = std::filesystem;
using Steps = std::vector<std::int64_t>;

// Set for the child: "weights", or "save" or "save_async" and steps.
constexpr auto kTask = "SEMITONE_TEST_TASK";
constexpr auto kFolder = "SEMITONE_TEST_FOLDER";
constexpr int kRefused = 3;  // the child's exit code after a FileError

void train_and_save(const fs::path& folder, bool asynchronous, std::istream& steps) {
  Training run({});
  auto checkpoint = run.checkpoint(folder, CheckpointOptions().keep(1));
  run.step = checkpoint.resume().value_or(0);
  for (std::int64_t step = 0; steps >> step;) {
    run.train_to(step);
    if (asynchronous) {
      checkpoint.save_async(step);
      checkpoint.wait();
    } else {
      checkpoint.save(step);
    }
  }
}

[[noreturn]] void do_task(const std::string& task, const fs::path& folder) {
  std::istringstream words(task);
  std::string first;
  words >> first;
  try {
    if (first == "weights") {
      weights::write(folder / "w.safetensors", {{"w", torch::ones({1000})}});
    } else {
      train_and_save(folder / "run", first == "save_async", words);
    }
  } catch (const FileError& error) {
    std::cerr << error.what() << '\n';
    std::exit(kRefused);
  }
  std::exit(0);
}

std::string parent_of(const std::string& path) {
  return fs::path(path).parent_path().string();
}

bool is_checkpoint(const std::string& path) {
  const std::string name = fs::path(path).filename().string();
  return name.starts_with("step-") && name.find('.') == std::string::npos;
}

bool is_in(const std::string& path, const std::string& folder) {
  return path == folder || path.starts_with(folder + '/');
}

// Follows the recorded calls, and expects that nothing takes its name before it is on the disk.
struct Disk {
  Disk(const std::string& folder, const fs::path& log) {
    std::ifstream lines(log);
    for (std::string call, path; std::getline(std::getline(lines, call, '\t'), path);) {
      if (!is_in(path, folder)) continue;
      if (call == "fail") {
        failed = path;
      } else if (call == "rename") {
        const std::size_t tab = path.find('\t');
        rename(path.substr(0, tab), path.substr(tab + 1));
      } else if (call == "mkdir") {
        // The call that saved an earlier checkpoint there has returned.
        EXPECT_TRUE(flushed.emplace(parent_of(path), true).first->second) << "before " << path;
        flushed[parent_of(path)] = false;
      } else if (call == "write") {
        if (flushed.insert_or_assign(path, false).second) flushed[parent_of(path)] = false;
      } else if (flushed.contains(path)) {  // flush
        flushed[path] = true;
      }
    }
  }

  void rename(const std::string& from, const std::string& to) {
    if (is_checkpoint(from)) {
      // An old one is removed. It may come back; the new one must not be lost with it.
      EXPECT_TRUE(flushed[parent_of(from)]) << from << " is removed too early";
      return;
    }
    const auto before = flushed;
    std::erase_if(flushed, [&](const auto& file) { return is_in(file.first, to); });
    for (const auto& [path, is_flushed] : before) {
      if (!is_in(path, from)) continue;
      EXPECT_TRUE(is_flushed) << path << " becomes a part of " << to;
      flushed.erase(path);
      flushed[to + path.substr(from.size())] = is_flushed;
    }
    flushed[parent_of(to)] = false;
    if (!is_checkpoint(to)) return;
    ++checkpoints;
    if (!fs::exists(to)) return;  // removed since
    for (const auto& file : fs::directory_iterator(to))
      EXPECT_TRUE(flushed.contains(file.path().string())) << file << ": no call was recorded";
  }

  // Whether files have their latest content on the disk, and directories their latest names.
  std::map<std::string, bool> flushed;
  std::string failed;  // the path whose flush failed
  int checkpoints = 0;
};

class Durability : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    torch::set_num_threads(1);
    if (const char* const task = std::getenv(kTask)) do_task(task, std::getenv(kFolder));
  }

  launch::ProcessResult run_child(const std::string& task, int failing_flush = 0) {
    fs::remove(log_);
    launch::ProcessOptions child("/proc/self/exe");
    child.arguments({"--gtest_filter=Durability.*", "--gtest_brief=1"})
        .environment(kTask, task)
        .environment(kFolder, folder_)
        .environment("SEMITONE_TEST_LOG", log_.string())
        .environment("SEMITONE_TEST_FAILING_FLUSH", std::to_string(failing_flush))
        .environment("LD_PRELOAD", RECORDED_FILES)
        .environment("OMP_NUM_THREADS", "1")
        .out(launch::Output::capture)
        .err(launch::Output::capture);
    return launch::run(child);
  }

  // In a new directory; the second checkpoint removes the first, and the third replaces the second.
  void expect_durable_checkpoints(const std::string& save) {
    const auto result = run_child(save + " 1 2 2");
    ASSERT_TRUE(result.status.success()) << result.err;
    const Disk disk(folder_, log_);
    EXPECT_EQ(disk.checkpoints, 3);
    for (const auto& [path, is_flushed] : disk.flushed) EXPECT_TRUE(is_flushed) << path;
  }

  const semitone::test::TemporaryFolder temporary_;
  const std::string folder_ = fs::canonical(temporary_.path()).string();  // as the system says it
  const fs::path run_ = fs::path(folder_) / "run";
  const fs::path log_ = fs::path(folder_) / "log";
};

TEST_F(Durability, OfSaveComesBeforeTheName) {
  expect_durable_checkpoints("save");
}

TEST_F(Durability, OfSaveAsyncComesBeforeTheName) {
  expect_durable_checkpoints("save_async");
}

TEST_F(Durability, OfAFileOfWeightsComesBeforeTheName) {
  const auto result = run_child("weights");
  ASSERT_TRUE(result.status.success()) << result.err;
  EXPECT_TRUE(Disk(folder_, log_).flushed.contains(folder_ + "/w.safetensors"));
}

TEST_F(Durability, ThatFailsIsAnErrorAndTheEarlierCheckpointStays) {
  Training run({});
  auto checkpoint = run.checkpoint(run_);
  run.train_to(1);
  checkpoint.save(1);
  std::map<std::int64_t, std::vector<at::Tensor>> states{{1, run.state()}};
  run.train_to(2);
  states[2] = run.state();
  const auto expect_only = [&](const Steps& steps) {
    EXPECT_EQ(checkpoint.steps(), steps);
    EXPECT_EQ(std::distance(fs::directory_iterator(run_), {}), std::ssize(steps));
    for (const std::int64_t step : steps) {
      checkpoint.resume(step);
      EXPECT_TRUE(same_bits(run.state(), states[step])) << step;
    }
  };
  int failures = 0;
  for (; failures < 100; ++failures) {  // a checkpoint has fewer flushes
    const auto result = run_child("save 2", failures + 1);
    const std::string failed = Disk(folder_, log_).failed;
    SCOPED_TRACE(failed);
    if (failed.empty()) {
      EXPECT_TRUE(result.status.success()) << result.err;
      break;
    }
    EXPECT_EQ(result.status.code, kRefused);
    const std::string name = failed.substr(0, failed.find(".partial-"));  // of the manifest
    EXPECT_EQ(result.err,
              "[checkpoint.save] expected to write '" + name + "', got Input/output error\n");
    // The directory comes last, when the new checkpoint is complete.
    expect_only(failed == run_ ? Steps{1, 2} : Steps{1});
  }
  expect_only({2});
  // Each file and both directories.
  EXPECT_EQ(failures, std::distance(fs::directory_iterator(checkpoint.path_of(2)), {}) + 2);
}

// Also if all but the names is on the disk.
TEST_F(Durability, OfTheNewOneComesBeforeACheckpointIsReplaced) {
  Training run({});
  auto checkpoint = run.checkpoint(run_);
  run.train_to(1);
  checkpoint.save(1);
  const auto identity = [&] {
    struct stat status = {};
    EXPECT_EQ(::stat(checkpoint.path_of(1).c_str(), &status), 0);
    return status.st_ino;
  };
  const auto first = identity();
  int failures = 0;
  for (; failures < 100; ++failures) {
    const auto result = run_child("save 1", failures + 1);
    if (result.status.success()) break;
    SCOPED_TRACE(result.err);
    EXPECT_EQ(result.status.code, kRefused);
    EXPECT_EQ(identity(), first);
    EXPECT_EQ(std::distance(fs::directory_iterator(run_), {}), 1);
  }
  EXPECT_GT(failures, 2);
  EXPECT_NE(identity(), first);
}

}  // namespace
}  // namespace semitone::checkpoint::test
