// The directory of the checkpoints: which stay, what a failed or killed writer leaves, and what
// save() refuses.

#include "semitone/checkpoint.h"
#include "src/checkpoint/folder.h"
#include "tests/checkpoint/training.h"
#include "tests/support/another_user.h"
#include "tests/support/captured_log.h"
#include "tests/support/environment.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace semitone::checkpoint::test {
namespace directory {
namespace {

namespace fs = std::filesystem;
using semitone::test::AnotherUser;
using semitone::test::CapturedLog;
using semitone::test::expect_error;
using semitone::test::message_of;
using semitone::test::TemporaryFolder;
using semitone::test::write_text;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

// A checkpoint of one number.
class CheckpointDirectory : public testing::Test {
 protected:
  Checkpoint make(const CheckpointOptions& options = {}) {
    Checkpoint made(folder_ / "run", options);
    made.add("value", value_);
    return made;
  }

  std::string failure_of(Checkpoint& checkpoint, std::int64_t step) {
    return message_of<FileError>([&] { checkpoint.save(step); });
  }

  TemporaryFolder folder_;
  std::int64_t value_ = 0;
};

TEST_F(CheckpointDirectory, ThatDoesNotExistHasNothingToResume) {
  auto checkpoint = make();
  value_ = 5;
  EXPECT_EQ(checkpoint.resume(), std::nullopt);
  EXPECT_THAT(checkpoint.steps(), ElementsAre());
  EXPECT_EQ(value_, 5);
  EXPECT_FALSE(fs::exists(checkpoint.directory()));
  fs::create_directory(checkpoint.directory());
  EXPECT_EQ(checkpoint.resume(), std::nullopt);
}

TEST_F(CheckpointDirectory, IsCreatedWithItsParents) {
  Checkpoint checkpoint(folder_ / "a" / "b" / "c/");
  checkpoint.add("value", value_);
  checkpoint.save(120);
  EXPECT_THAT(names_in(folder_ / "a" / "b" / "c"), ElementsAre("step-00000120"));
  EXPECT_THAT(names_in(checkpoint.path_of(120)),
              ElementsAre("manifest.json", "random.rank0.pt", "value.pt"));
}

TEST_F(CheckpointDirectory, KeepsTheNewestOnes) {
  auto checkpoint = make(CheckpointOptions().keep(2));
  for (value_ = 1; value_ <= 5; ++value_) checkpoint.save(value_ * 100);
  EXPECT_THAT(names_in(checkpoint.directory()), ElementsAre("step-00000400", "step-00000500"));
  EXPECT_EQ(checkpoint.resume(), 500);
  EXPECT_EQ(value_, 5);
}

TEST_F(CheckpointDirectory, KeepsThreeUnlessToldOtherwise) {
  auto three = make();
  for (std::int64_t step = 1; step <= 5; ++step) three.save(step);
  EXPECT_THAT(three.steps(), ElementsAre(3, 4, 5));
  auto all = make(CheckpointOptions().keep(std::nullopt));
  for (std::int64_t step = 6; step <= 8; ++step) all.save(step);
  EXPECT_THAT(all.steps(), ElementsAre(3, 4, 5, 6, 7, 8));
  auto one = make(CheckpointOptions().keep(1));
  one.save(9);
  EXPECT_THAT(one.steps(), ElementsAre(9));
}

TEST_F(CheckpointDirectory, KeepsTheBestOnesBesidesTheNewest) {
  auto checkpoint = make(CheckpointOptions().keep(1).keep_best(2));
  const std::vector<double> losses{
      5, 3, 4, 3, std::nan(""), 9, -std::numeric_limits<double>::infinity()};
  for (std::int64_t step = 1; step <= 7; ++step) {
    value_ = step;
    checkpoint.save(step, losses.at(static_cast<std::size_t>(step) - 1));
  }
  // Equal metrics: the later is better. NaN and infinity are no metrics.
  EXPECT_THAT(checkpoint.steps(), ElementsAre(2, 4, 7));
  EXPECT_EQ(checkpoint.best_step(), 4);
  checkpoint.resume(*checkpoint.best_step());
  EXPECT_EQ(value_, 4);
}

TEST_F(CheckpointDirectory, KeepsHighMetricsIfTheseAreTheBest) {
  auto checkpoint = make(CheckpointOptions().keep(2).keep_best(1, Best::highest));
  for (const auto& [step, accuracy] : std::vector<std::pair<std::int64_t, double>>{
           {1, 0.5}, {2, 0.9}, {3, 0.7}, {4, 0.8}, {5, 0.6}})
    checkpoint.save_async(step, accuracy);
  checkpoint.save(6);  // has none
  EXPECT_THAT(checkpoint.steps(), ElementsAre(2, 5, 6));
  EXPECT_EQ(checkpoint.best_step(), 2);
}

TEST_F(CheckpointDirectory, HasNoBestStepWithoutMetrics) {
  auto checkpoint = make(CheckpointOptions().keep(1).keep_best(3));
  EXPECT_EQ(checkpoint.best_step(), std::nullopt);
  for (std::int64_t step = 1; step <= 3; ++step) checkpoint.save(step);
  EXPECT_EQ(checkpoint.best_step(), std::nullopt);
  EXPECT_THAT(checkpoint.steps(), ElementsAre(3));
}

// It may be whole. A directory in its place cannot be read, also by root.
TEST_F(CheckpointDirectory, ACheckpointWhoseMetricCannotBeReadStays) {
  auto checkpoint = make(CheckpointOptions().keep(1).keep_best(1));
  checkpoint.save(1, 0.1);
  checkpoint.save(2, 0.5);
  ASSERT_THAT(checkpoint.steps(), ElementsAre(1, 2));
  const fs::path manifest = checkpoint.path_of(1) / "manifest.json";
  fs::remove(manifest);
  fs::create_symlink("manifest.json", manifest);  // a loop
  checkpoint.save(3, 0.6);
  EXPECT_THAT(checkpoint.steps(), ElementsAre(1, 2, 3));
  EXPECT_EQ(checkpoint.best_step(), 2);
}

TEST_F(CheckpointDirectory, ADamagedManifestIsNotTheBest) {
  auto checkpoint = make(CheckpointOptions().keep_best(1));
  checkpoint.save(1, 0.5);
  checkpoint.save(2, 0.25);
  std::ofstream(checkpoint.path_of(2) / "manifest.json") << "x";
  EXPECT_EQ(checkpoint.best_step(), 1);
}

TEST_F(CheckpointDirectory, HasStepsInNumericalOrder) {
  auto checkpoint = make(CheckpointOptions().keep(std::nullopt));
  for (const std::int64_t step : {99'999'999L, 100'000'000L, 5'000'000'000L}) {
    value_ = step;
    checkpoint.save(step);
  }
  EXPECT_THAT(checkpoint.steps(), ElementsAre(99'999'999, 100'000'000, 5'000'000'000));
  value_ = 0;
  EXPECT_EQ(checkpoint.resume(), 5'000'000'000);
  EXPECT_EQ(value_, 5'000'000'000);
}

TEST_F(CheckpointDirectory, ReplacesACheckpointOfTheSameStep) {
  auto checkpoint = make();
  value_ = 1;
  checkpoint.save(10);
  value_ = 2;
  checkpoint.save(10);
  value_ = 0;
  EXPECT_EQ(checkpoint.resume(), 10);
  EXPECT_EQ(value_, 2);
  EXPECT_THAT(names_in(checkpoint.directory()), ElementsAre("step-00000010"));
}

// A signal that arrives in a step that was just saved.
TEST_F(CheckpointDirectory, HasTheMetricOfAStepThatIsSavedAgainWithoutOne) {
  auto checkpoint = make(CheckpointOptions().keep(1).keep_best(1));
  checkpoint.save(1, 0.5);
  checkpoint.save(1);
  checkpoint.save(2, 0.7);
  checkpoint.save(3);
  EXPECT_THAT(checkpoint.steps(), ElementsAre(1, 3));
  EXPECT_EQ(checkpoint.best_step(), 1);
  checkpoint.save_async(3, 0.4);
  EXPECT_EQ(checkpoint.best_step(), 3);
  checkpoint.save(3, std::nan(""));
  EXPECT_EQ(checkpoint.best_step(), std::nullopt);
  // Again after a restart: the state is that of the step.
  checkpoint.save_async(4, 0.2);
  checkpoint.wait();
  auto restarted = make(CheckpointOptions().keep(1).keep_best(1));
  EXPECT_EQ(restarted.resume(), 4);
  restarted.save(4);
  restarted.save(5, 0.3);
  EXPECT_EQ(restarted.best_step(), 4);
}

// As a run's link to a disk that is not mounted.
TEST_F(CheckpointDirectory, ThatIsALinkToNothingIsAnError) {
  fs::create_directory_symlink(folder_ / "away", folder_ / "link");
  for (const fs::path& place : {folder_ / "link", folder_ / "link" / "run"}) {
    Checkpoint checkpoint(place);
    checkpoint.add("value", value_);
    EXPECT_THAT(message_of<FileError>([&] { checkpoint.resume(); }),
                AllOf(HasSubstr("'" + (folder_ / "link").string() + "', a link to what does not"),
                      HasSubstr("mounted?")));
  }
  fs::create_directory(folder_ / "away");
  Checkpoint checkpoint(folder_ / "link" / "run");
  checkpoint.add("value", value_);
  EXPECT_EQ(checkpoint.resume(), std::nullopt);
}

TEST_F(CheckpointDirectory, OfARunThatShouldHaveBeenResumedIsAnError) {
  make().save(500);
  auto again = make();
  expect_error([&] { again.save(100); },
               {"[checkpoint.save]", "after 500", "got 100", "call resume()"});
  EXPECT_THAT(names_in(again.directory()), ElementsAre("step-00000500"));
}

// Its keep limit would delete them.
TEST_F(CheckpointDirectory, OfAnotherProcessIsNotSavedToBeforeItIsResumed) {
  make().save(100);
  fs::rename(folder_ / "run", folder_ / "of_another");  // which this process has not used
  Checkpoint checkpoint(folder_ / "of_another", CheckpointOptions().keep(1));
  checkpoint.add("value", value_);
  expect_error([&] { checkpoint.save(1000); },
               {"[checkpoint.save]", "another run", "step 100", "call resume()"});
  EXPECT_THAT(names_in(folder_ / "of_another"), ElementsAre("step-00000100"));
  EXPECT_EQ(checkpoint.resume(), 100);
  checkpoint.save(1000);
  // An object for each save.
  Checkpoint later(folder_ / "of_another");
  later.add("value", value_).save(2000);
  EXPECT_THAT(later.steps(), ElementsAre(1000, 2000));
}

TEST_F(CheckpointDirectory, OfAnObjectForEachSaveMayEndWithASlash) {
  for (const std::int64_t step : {1, 2, 3}) {
    Checkpoint checkpoint(folder_ / "new" / "run" / "");
    checkpoint.add("value", value_).save(step);
  }
  EXPECT_THAT(names_in(folder_ / "new" / "run"),
              ElementsAre("step-00000001", "step-00000002", "step-00000003"));
}

// A program may begin anew where resume() finds damage only.
TEST_F(CheckpointDirectory, WithDamagedCheckpointsOnlyCanBeSavedTo) {
  make().save(100);
  fs::rename(folder_ / "run", folder_ / "of_another");
  write_text(folder_ / "of_another" / "step-00000100" / "manifest.json", "");
  Checkpoint checkpoint(folder_ / "of_another");
  checkpoint.add("value", value_);
  expect_error([&] { checkpoint.resume(); }, {"an undamaged checkpoint"});
  checkpoint.save(5);
  EXPECT_THAT(checkpoint.steps(), ElementsAre(5));
}

// Such as "runs/latest", which a later job lets point to its own.
TEST_F(CheckpointDirectory, StaysWhereALinkPointedAtFirst) {
  fs::create_directory(folder_ / "a");
  fs::create_directory(folder_ / "b");
  fs::create_directory_symlink(folder_ / "a", folder_ / "latest");
  Checkpoint checkpoint(folder_ / "latest");
  checkpoint.add("value", value_);
  fs::remove(folder_ / "latest");
  fs::create_directory_symlink(folder_ / "b", folder_ / "latest");
  checkpoint.save(1);
  EXPECT_THAT(names_in(folder_ / "a"), ElementsAre("step-00000001"));
  EXPECT_THAT(names_in(folder_ / "b"), ElementsAre());
}

TEST_F(CheckpointDirectory, CanBeResumedAtAnEarlierStep) {
  auto checkpoint = make();
  for (value_ = 1; value_ <= 3; ++value_) checkpoint.save(value_ * 10);
  checkpoint.resume(20);
  EXPECT_EQ(value_, 2);
  // The later checkpoint is good, and stays.
  expect_error([&] { checkpoint.save(25); }, {"[checkpoint.save]", "after 30", "got 25"});
  EXPECT_THAT(checkpoint.steps(), ElementsAre(10, 20, 30));
  checkpoint.resume(30);
  checkpoint.save(40);
}

TEST_F(CheckpointDirectory, WithoutTheStepOrWithADamagedOneIsAnErrorAndNoEarlierOneIsTaken) {
  auto checkpoint = make();
  value_ = 1;
  EXPECT_THAT(message_of<FileError>([&] { checkpoint.resume(5); }),
              AllOf(HasSubstr("a checkpoint of step 5"), HasSubstr("got none")));
  checkpoint.save(1);
  checkpoint.save(2);
  EXPECT_THAT(message_of<FileError>([&] { checkpoint.resume(5); }), HasSubstr("got only 1, 2"));
  write_text(checkpoint.path_of(2) / "value.pt", "damaged");
  value_ = 9;
  EXPECT_THAT(message_of<FileError>([&] { checkpoint.resume(2); }),
              AllOf(HasSubstr("step-00000002"), HasSubstr("value.pt"),
                    HasSubstr("resume from another step")));
  EXPECT_EQ(value_, 9);
  checkpoint.resume(1);
  EXPECT_EQ(value_, 1);
}

TEST_F(CheckpointDirectory, LosesWhatKilledWritersLeft) {
  auto checkpoint = make();
  checkpoint.save(1);
  const fs::path left = checkpoint.directory() / "step-00000002.partial";
  fs::create_directory(left);
  write_text(left / "model.pt", "incomplete");
  write_text(checkpoint.directory() / "notes.txt", "mine");
  fs::create_directory(checkpoint.directory() / "step-7");
  EXPECT_EQ(checkpoint.resume(), 1);
  checkpoint.save(3);
  EXPECT_THAT(names_in(checkpoint.directory()),
              ElementsAre("notes.txt", "step-00000001", "step-00000003", "step-7"));
}

TEST_F(CheckpointDirectory, AFileWithTheNameOfACheckpointIsNone) {
  auto checkpoint = make();
  value_ = 3;
  checkpoint.save(1);
  write_text(checkpoint.directory() / "step-00000500", "");
  value_ = 0;
  EXPECT_THAT(checkpoint.steps(), ElementsAre(1));
  EXPECT_EQ(checkpoint.resume(), 1);
  EXPECT_EQ(value_, 3);
  checkpoint.save(2);
  EXPECT_THAT(checkpoint.steps(), ElementsAre(1, 2));
}

// Where names cannot be exchanged, a checkpoint that is replaced has none for a moment.
TEST_F(CheckpointDirectory, HasACheckpointAgainThatAKilledWriterWasReplacing) {
  for (const bool resumes : {true, false}) {
    auto checkpoint = make();
    value_ = 7;
    checkpoint.save(5);
    const fs::path complete = checkpoint.directory() / "step-00000005";
    fs::rename(complete, checkpoint.directory() / "step-00000005-old.partial");
    fs::create_directory(checkpoint.directory() / "step-00000005.partial");
    value_ = 0;
    auto next = make();
    if (resumes) {
      EXPECT_EQ(next.resume(), 5);
      EXPECT_EQ(value_, 7);
    } else {
      expect_error([&] { next.save(4); }, {"expected a step after 5"});
    }
    next.save(6);
    EXPECT_THAT(names_in(next.directory()), ElementsAre("step-00000005", "step-00000006"));
    fs::remove_all(next.directory());
  }
}

TEST_F(CheckpointDirectory, IsFoundThroughALinkAsTheSystemFindsIt) {
  fs::create_directories(folder_ / "there" / "below");
  fs::create_directory_symlink(folder_ / "there" / "below", folder_ / "link");
  Checkpoint checkpoint(folder_ / "link" / ".." / "runs" / "7");
  checkpoint.add("value", value_);
  checkpoint.save(1);
  EXPECT_TRUE(fs::is_directory(folder_ / "there" / "runs" / "7" / "step-00000001"));
}

// Without locks, as on some network file systems: it began the same step anew meanwhile.
TEST_F(CheckpointDirectory, OfAnotherProcessIsNotCompletedByThisOne) {
  Staging staging(folder_ / "run");
  staging.begin(1);
  const fs::path partial = partial_path(folder_ / "run", 1);
  fs::rename(partial, folder_ / "of this one");
  fs::create_directory(partial);
  EXPECT_THAT(message_of<FileError>([&] { staging.commit(); }),
              HasSubstr("another one that is saving there"));
  EXPECT_TRUE(steps_in(folder_ / "run").empty());
  EXPECT_TRUE(fs::exists(partial));
}

TEST_F(CheckpointDirectory, ThatAnotherProcessWritesIsAnError) {
  auto checkpoint = make();
  checkpoint.save(1);
  // The lock belongs to the open file: a second one is as good as another process's.
  const int other = ::open(checkpoint.directory().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  ASSERT_GE(other, 0);
  ASSERT_EQ(::flock(other, LOCK_EX | LOCK_NB), 0);
  EXPECT_THAT(failure_of(checkpoint, 2), HasSubstr("another one that is saving there"));
  ::close(other);
  checkpoint.save(2);
  EXPECT_THAT(checkpoint.steps(), ElementsAre(1, 2));
}

// One that waits for the first checkpoint of a run, for example.
TEST_F(CheckpointDirectory, CanBeSavedWhileAnotherProcessLooksForACheckpointToResume) {
  auto checkpoint = make();
  std::atomic<bool> is_done = false;
  std::thread reader([&] {
    while (!is_done) steps_to_resume_in(folder_ / "run");
  });
  std::string failure;
  for (std::int64_t step = 1; step <= 50 && failure.empty(); ++step) {
    try {
      checkpoint.save(step);
    } catch (const FileError& error) {
      failure = error.what();
    }
  }
  is_done = true;
  reader.join();
  EXPECT_EQ(failure, "");
}

TEST_F(CheckpointDirectory, ThatIsAFileIsAnError) {
  write_text(folder_ / "run", "a file");
  auto checkpoint = make();
  EXPECT_THAT(failure_of(checkpoint, 1),
              AllOf(HasSubstr("[checkpoint.save]"), HasSubstr((folder_ / "run").string()),
                    HasSubstr("Not a directory"), HasSubstr("choose a directory")));
  EXPECT_THAT(message_of<FileError>([&] { checkpoint.resume(); }), HasSubstr("Not a directory"));
  Checkpoint below(folder_ / "run" / "below");
  below.add("value", value_);
  EXPECT_THAT(failure_of(below, 1), HasSubstr("Not a directory"));
}

TEST_F(CheckpointDirectory, ThatIsReadOnlyIsAnErrorAndStaysAsItIs) {
  auto checkpoint = make();
  value_ = 7;
  checkpoint.save(1);
  fs::permissions(folder_.path(), fs::perms::all);
  const auto before = fs::status(checkpoint.directory()).permissions();
  fs::permissions(checkpoint.directory(), fs::perms::all & ~fs::perms::owner_write &
                                              ~fs::perms::group_write & ~fs::perms::others_write);
  {
    const AnotherUser user;
    EXPECT_THAT(failure_of(checkpoint, 2),
                AllOf(HasSubstr("Permission denied"), HasSubstr("this user may write to")));
    value_ = 0;
    EXPECT_EQ(checkpoint.resume(), 1);
    EXPECT_EQ(value_, 7);
  }
  fs::permissions(checkpoint.directory(), before);
  EXPECT_THAT(names_in(checkpoint.directory()), ElementsAre("step-00000001"));
  checkpoint.save(2);
}

// Another user has put something into an old checkpoint.
TEST_F(CheckpointDirectory, WithAnOldCheckpointThatCannotBeRemovedTakesNewOnes) {
  auto checkpoint = make(CheckpointOptions().keep(1));
  checkpoint.save(1);
  const fs::path foreign = checkpoint.path_of(1) / "foreign";
  fs::create_directory(foreign);
  write_text(foreign / "file", "");
  fs::permissions(foreign, fs::perms::owner_read | fs::perms::owner_exec);
  for (const fs::path& path : {folder_.path(), checkpoint.directory(), checkpoint.path_of(1)})
    fs::permissions(path, fs::perms::all);
  const CapturedLog log;
  {
    const AnotherUser user;
    for (const std::int64_t step : {2, 3, 4}) checkpoint.save(step);
  }
  EXPECT_THAT(names_in(checkpoint.directory()),
              ElementsAre("step-00000001.partial", "step-00000004"));
  EXPECT_THAT(log.text(), HasSubstr("step-00000001.partial': Permission denied"));
  fs::permissions(checkpoint.directory() / "step-00000001.partial" / "foreign", fs::perms::all);
  checkpoint.save(5);
  EXPECT_THAT(names_in(checkpoint.directory()), ElementsAre("step-00000005"));
}

// The kernel refuses to let files grow beyond a size: what a full disk does, for this process.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    EXPECT_EQ(::getrlimit(RLIMIT_FSIZE, &before_), 0);
    const rlimit small{bytes, before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int);
};

TEST(FullDisk, LeavesTheEarlierCheckpointsAndNoPartialOne) {
  const TemporaryFolder folder;
  Training run({});
  auto checkpoint = run.checkpoint(folder / "run");
  run.train_to(2);
  checkpoint.save(2);
  const auto saved = run.state();
  run.train_to(3);
  const auto state = run.state();
  int failures = 0;
  // Each limit stops another file, and the last none.
  for (const unsigned bytes :
       {0U, 500U, 1500U, 2500U, 5000U, 10'000U, 20'000U, 40'000U, 1'000'000U}) {
    SCOPED_TRACE(bytes);
    std::string message;
    try {
      const FileSizeLimit limit(bytes);
      checkpoint.save(3);
    } catch (const FileError& error) {
      message = error.what();
      ++failures;
      EXPECT_THAT(message, AllOf(HasSubstr("step-00000003.partial"), HasSubstr("File too large")));
      EXPECT_THAT(names_in(checkpoint.directory()), ElementsAre("step-00000002"));
      EXPECT_TRUE(same_bits(run.state(), state));
    }
  }
  EXPECT_GT(failures, 3);
  EXPECT_THAT(checkpoint.steps(), ElementsAre(2, 3));
  fs::remove_all(checkpoint.path_of(3));
  EXPECT_EQ(checkpoint.resume(), 2);
  EXPECT_TRUE(same_bits(run.state(), saved));
}

TEST_F(CheckpointDirectory, OfRanksWithoutAGroupIsAWarning) {
  const CapturedLog log;
  semitone::test::Environment environment({"WORLD_SIZE"});
  make();
  environment.set({{"WORLD_SIZE", "1"}});
  make();
  EXPECT_EQ(log.text(), "");
  environment.set({{"WORLD_SIZE", "2"}});
  make();
  EXPECT_THAT(log.text(), AllOf(HasSubstr("WORLD_SIZE"), HasSubstr("group of 2 ranks")));
}

TEST_F(CheckpointDirectory, CanBeMovedWithTheObject) {
  auto first = make();
  Checkpoint second = std::move(first);
  value_ = 3;
  second.save(1);
  value_ = 0;
  EXPECT_EQ(second.resume(), 1);
  EXPECT_EQ(value_, 3);
  EXPECT_THAT(second.path_of(1).string(), Not(HasSubstr("//")));
}

}  // namespace
}  // namespace directory
}  // namespace semitone::checkpoint::test
