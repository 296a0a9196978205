#include "semitone/core/error.h"
#include "semitone/report/recorder.h"
#include "semitone/report/run_log.h"
#include "src/launch/process.h"
#include "tests/report/run_directory.h"
#include "tests/support/captured_log.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"

#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <gmock/gmock.h>
#include <sys/resource.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <system_error>

namespace semitone::report {
namespace {

namespace fs = std::filesystem;
using semitone::test::CapturedLog;
using semitone::test::message_of;
using semitone::test::TemporaryFolder;
using test::events_files;
using test::metrics_in;
using test::read_events;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const auto kAtOnce = RunLogOptions().flush_interval(std::chrono::milliseconds(0));

// A directory in which a file is on a full disk.
void make_full(const fs::path& directory, const char* file) {
  fs::create_directories(directory);
  fs::create_symlink("/dev/full", directory / file);
}

// While it lives, no file of this process grows beyond a size.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  void (*handler_)(int);
  rlimit before_{};
};

TEST(RunLogFailure, OfTheDirectoryNamesIt) {
  const TemporaryFolder folder;
  semitone::test::write_text(folder / "file", "");
  EXPECT_THAT(message_of<FileError>([&] { const RunLog log(folder / "file" / "run"); }),
              AllOf(HasSubstr("[report.run_log]"), HasSubstr((folder / "file" / "run").string()),
                    HasSubstr("Not a directory")));
  EXPECT_THAT(message_of<FileError>([&] { const RunLog log("/proc/semitone"); }),
              HasSubstr("/proc/semitone"));
}

TEST(RunLogFailure, OfAFullDiskIsAnErrorAtTheStart) {
  const TemporaryFolder folder;
  make_full(folder.path(), "metrics.csv");
  EXPECT_THAT(message_of<FileError>([&] { const RunLog log(folder.path()); }),
              AllOf(HasSubstr("metrics.csv"), HasSubstr("No space left on device")));
}

TEST(RunLogFailure, OfAFullDiskIsAnError) {
  const TemporaryFolder folder;
  make_full(folder.path(), "texts.jsonl");
  const CapturedLog captured;
  {
    RunLog log(folder.path(), kAtOnce);
    log.add_scalar("loss", 1);
    EXPECT_THAT(message_of<FileError>([&] { log.add_text("note", "a"); }),
                AllOf(HasSubstr("texts.jsonl"), HasSubstr("No space left on device")));
    // Other files are written all the same.
    EXPECT_EQ(read_events(events_files(folder.path()).front()).all.size(), 3U);
    log.add_scalar("loss", 2);
  }
  EXPECT_THAT(metrics_in(folder.path()), ElementsAre("0,loss,1", "0,loss,2"));
  EXPECT_EQ(captured.text(), "");
}

TEST(RunLogFailure, IsOneWarningIfTheTrainingShallContinue) {
  const TemporaryFolder folder;
  make_full(folder.path(), "texts.jsonl");
  const CapturedLog captured;
  {
    RunLog log(folder.path(), RunLogOptions(kAtOnce).ignore_write_errors(true));
    for (int i = 0; i < 3; ++i) log.add_text("note", "a");
    log.add_scalar("loss", 1);
  }
  EXPECT_THAT(metrics_in(folder.path()), ElementsAre("0,loss,1"));
  EXPECT_THAT(captured.text(), AllOf(HasSubstr("texts.jsonl"), HasSubstr("is lost")));
  EXPECT_EQ(captured.text().find("texts.jsonl"), captured.text().rfind("texts.jsonl"));
}

TEST(RunLogFailure, InTheDestructorIsAWarning) {
  const TemporaryFolder folder;
  make_full(folder.path(), "texts.jsonl");
  const CapturedLog captured;
  {
    RunLog log(folder.path(), RunLogOptions().flush_interval(std::chrono::hours(1)));
    log.add_text("note", "a");
  }
  EXPECT_THAT(captured.text(), HasSubstr("texts.jsonl"));
  EXPECT_EQ(test::json_in(folder / "run.json").at("outcome"), "finished");
}

TEST(RunLogFailure, OfASampleLeavesStepAndEndAsTheyAre) {
  const TemporaryFolder folder;
  make_full(folder.path(), "samples.jsonl");
  torch::nn::Linear net(2, 1);
  RunLog log(folder.path(), kAtOnce);
  const Recorder recorder(log, *net, RecorderOptions().every(1));
  const auto full = AllOf(HasSubstr("samples.jsonl"), HasSubstr("No space left on device"));
  EXPECT_THAT(message_of<FileError>([&] { log.set_step(1); }), full);  // describes the model
  log.set_step(2);
  EXPECT_THAT(message_of<FileError>([&] { log.set_step(3); }), full);
  log.add_scalar("loss", 1);
  EXPECT_THAT(metrics_in(folder.path()), ElementsAre("3,loss,1"));
  EXPECT_THAT(message_of<FileError>([&] { log.close(); }), full);
  EXPECT_EQ(test::json_in(folder / "run.json").at("outcome"), "finished");
}

TEST(RunLogFailure, LeavesWholeLines) {
  const TemporaryFolder folder;
  RunLog log(folder.path(), RunLogOptions().flush_interval(std::chrono::hours(1)));
  for (int i = 0; i < 10; ++i) log.add_scalar("loss", i);
  log.flush();
  const auto events = read_events(events_files(folder.path()).front()).all.size();
  const auto size = fs::file_size(folder / "metrics.csv");
  for (int i = 0; i < 10; ++i) log.add_scalar("loss", i);
  {
    const FileSizeLimit limit(size + 30);  // within the second line
    EXPECT_THAT(message_of<FileError>([&] { log.flush(); }),
                AllOf(HasSubstr("metrics.csv"), HasSubstr("File too large")));
  }
  EXPECT_EQ(metrics_in(folder.path()).size(), 10U);
  EXPECT_FALSE(read_events(events_files(folder.path()).front()).is_cut_off);
  EXPECT_EQ(read_events(events_files(folder.path()).front()).all.size(), events);
  // There is room again.
  log.add_scalar("loss", 11, 11);
  log.flush();
  EXPECT_EQ(metrics_in(folder.path()).size(), 11U);
}

// Set for the process that is killed.
constexpr auto kFolder = "SEMITONE_TEST_FOLDER";

[[noreturn]] void write_until_killed(const fs::path& directory) {
  RunLog log(directory, RunLogOptions().flush_interval(std::chrono::milliseconds(1)));
  for (std::int64_t step = 0;; ++step) {
    log.set_step(step);
    log.add_scalar("loss", 0.125);
    log.add_text("note", "a text");
    if (step % 100 == 0) log.add_histogram("values", torch::arange(1000));
  }
}

// Starts a process that writes, and kills it when metrics.csv has grown.
void write_and_kill(const fs::path& directory) {
  launch::ProcessOptions options("/proc/self/exe");
  options.arguments({"--gtest_filter=KilledRunLog.*", "--gtest_brief=1"})
      .environment(kFolder, directory.string())
      .death_signal(SIGKILL);
  const auto size = [&] {
    std::error_code error;
    const auto bytes = fs::file_size(directory / "metrics.csv", error);
    return error ? std::uintmax_t{0} : bytes;
  };
  const auto before = size();
  launch::Process child(options);
  EXPECT_TRUE(semitone::test::eventually([&] { return size() > before + 10'000; }));
  child.send(SIGKILL);
  EXPECT_FALSE(child.wait().status.success());
}

TEST(KilledRunLog, LeavesWholeLines) {
  if (const char* const mine = std::getenv(kFolder)) write_until_killed(mine);
  const TemporaryFolder folder;
  for (std::size_t kill = 1; kill <= 5; ++kill) {
    write_and_kill(folder.path());
    // The next start removes a line that the kernel did not finish: it may stop a write between two
    // pages of a file.
    RunLog(folder.path()).close();
    EXPECT_GT(metrics_in(folder.path()).size(), 100 * kill);
    EXPECT_GT(test::texts_in(folder.path()).size(), 100 * kill);
    std::size_t written = 0;
    for (const auto& path : events_files(folder.path()))
      if (read_events(path).all.size() > 100) ++written;
    EXPECT_EQ(written, kill);
  }
  EXPECT_EQ(test::json_in(folder / "run.json").at("outcome"), "running");
}

}  // namespace
}  // namespace semitone::report
