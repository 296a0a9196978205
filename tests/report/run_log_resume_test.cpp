#include "semitone/report/run_log.h"
#include "tests/report/run_directory.h"
#include "tests/support/environment.h"
#include "tests/support/errors.h"

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <string>
#include <vector>

namespace semitone::report {
namespace {

using semitone::test::Environment;
using semitone::test::expect_error;
using semitone::test::read_text;
using semitone::test::TemporaryFolder;
using semitone::test::write_text;
using test::Event;
using test::events_files;
using test::events_in;
using test::json_in;
using test::metrics_in;
using test::read_events;
using test::samples_in;
using test::texts_in;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::IsEmpty;
using ::testing::StartsWith;

void train(const std::filesystem::path& directory, std::int64_t from, std::int64_t to) {
  RunLog log(directory, RunLogOptions().config({{"lr", "0.1"}}));
  for (std::int64_t step = from; step <= to; ++step) {
    log.set_step(step);
    log.add_scalar("loss", 0.5);
  }
}

// What TensorBoard's reader sees, the records in short: "restart 3", "loss 4".
std::vector<std::string> records_of(const std::filesystem::path& path) {
  std::vector<std::string> records;
  for (const Event& event : read_events(path).all) {
    if (!event.file_version.empty()) continue;
    records.push_back((event.is_restart ? "restart" : event.name) + " " +
                      std::to_string(event.step));
  }
  return records;
}

TEST(ResumedRun, AddsToTheFilesAndTellsTensorBoardWhereItBegins) {
  const TemporaryFolder folder;
  train(folder.path(), 1, 3);
  train(folder.path(), 3, 4);
  EXPECT_THAT(metrics_in(folder.path()),
              ElementsAre("1,loss,0.5", "2,loss,0.5", "3,loss,0.5", "3,loss,0.5", "4,loss,0.5"));
  const auto files = events_files(folder.path());
  ASSERT_EQ(files.size(), 2U);
  EXPECT_THAT(records_of(files[0]),
              ElementsAre("config/text_summary 0", "loss 1", "loss 2", "loss 3"));
  EXPECT_THAT(records_of(files[1]),
              ElementsAre("restart 3", "config/text_summary 3", "loss 3", "loss 4"));
  EXPECT_EQ(json_in(folder / "run.json").at("outcome"), "finished");
  EXPECT_EQ(json_in(folder / "run-2.json").at("outcome"), "finished");
}

TEST(ResumedRun, IsMarkedWithoutSetStepToo) {
  const TemporaryFolder folder;
  for (const std::int64_t step : {1, 2}) {
    RunLog log(folder.path());
    log.add_scalar("loss", 0.5, step);
  }
  EXPECT_THAT(records_of(events_files(folder.path()).at(1)), ElementsAre("restart 2", "loss 2"));
}

TEST(ResumedRun, BeginsAtItsFirstStepAlsoIfATextComesBefore) {
  const TemporaryFolder folder;
  for (const std::int64_t first : {1, 3}) {
    RunLog log(folder.path());
    log.add_text("command", "train");
    for (std::int64_t step = first; step < first + 3; ++step) {
      log.set_step(step);
      log.add_scalar("loss", 0.5);
    }
  }
  EXPECT_THAT(records_of(events_files(folder.path()).at(1)),
              ElementsAre("command/text_summary 0", "restart 3", "loss 3", "loss 4", "loss 5"));
}

TEST(ResumedRun, FirstSetStepMarksAlsoAfterAValueOfALaterStep) {
  const TemporaryFolder folder;
  train(folder.path(), 1, 3);
  {
    RunLog log(folder.path());
    log.add_scalar("parameters", 7, 100);
    log.set_step(2);
  }
  EXPECT_THAT(records_of(events_files(folder.path()).at(1)),
              ElementsAre("restart 100", "parameters 100", "restart 2"));
}

TEST(ResumedRun, GoesBackWithoutANewStartToo) {
  const TemporaryFolder folder;
  RunLog log(folder.path());
  for (const std::int64_t step : {5, 6, 5}) {
    log.set_step(step);
    log.add_scalar("loss", 0.5);
  }
  log.close();
  EXPECT_THAT(records_of(events_files(folder.path()).front()),
              ElementsAre("loss 5", "loss 6", "restart 5", "loss 5"));
}

TEST(ResumedRun, HasRestartsAmongItsSamples) {
  const TemporaryFolder folder;
  const auto size = [&] { return std::filesystem::file_size(folder.path() / "metrics.csv"); };
  const auto restart = [](int step, std::uintmax_t bytes) {
    return nlohmann::json{{"step", step}, {"kind", "restart"}, {"metrics_bytes", bytes}};
  };
  train(folder.path(), 1, 3);
  EXPECT_THAT(samples_in(folder.path()), IsEmpty());
  const auto first = size();
  train(folder.path(), 3, 4);
  EXPECT_THAT(samples_in(folder.path()), ElementsAre(restart(3, first)));
  const auto second = size();
  RunLog log(folder.path());
  for (const std::int64_t step : {5, 6}) log.set_step(step);
  log.add_scalar("loss", 0.5);  // waits in memory
  log.set_step(5);
  log.close();
  EXPECT_THAT(samples_in(folder.path()),
              ElementsAre(restart(3, first), restart(5, second), restart(5, size())));
}

TEST(ResumedRun, MayHaveSamplesOnly) {
  const TemporaryFolder folder;
  write_text(folder / "samples.jsonl", "{\"step\":1,\"wall_time\":2e9,\"kind\":\"sample\"}\n{\"st");
  expect_error([&] { const RunLog log(folder.path(), RunLogOptions().append(false)); },
               {"a directory without a run", (folder / "samples.jsonl").string()});
  RunLog log(folder.path());
  log.set_step(4);
  log.close();
  const auto samples = samples_in(folder.path());
  ASSERT_EQ(samples.size(), 2U);
  EXPECT_EQ(samples[0].at("kind"), "sample");
  EXPECT_EQ(samples[1].at("kind"), "restart");
}

TEST(ResumedRun, RemovesALineThatIsNotComplete) {
  const TemporaryFolder folder;
  train(folder.path(), 1, 2);
  const std::string metrics = read_text(folder / "metrics.csv");
  write_text(folder / "metrics.csv", metrics + "3,1763");
  write_text(folder / "texts.jsonl", "{\"step\":1,\"te");
  train(folder.path(), 3, 3);
  EXPECT_THAT(metrics_in(folder.path()), ElementsAre("1,loss,0.5", "2,loss,0.5", "3,loss,0.5"));
  EXPECT_EQ(read_text(folder / "texts.jsonl"), "");
}

TEST(ResumedRun, FindsTheLastWholeLineFarFromTheEnd) {
  const TemporaryFolder folder;
  const std::string whole = "step,wall_time,name,value\n1,2.000,loss,3\n";
  write_text(folder / "metrics.csv", whole + std::string(10'000, '7'));
  RunLog(folder.path()).close();
  EXPECT_EQ(read_text(folder / "metrics.csv"), whole);
}

TEST(ResumedRun, IsRefusedIfTheDirectoryMustBeNew) {
  const TemporaryFolder folder;
  const auto options = RunLogOptions().append(false);
  RunLog(folder / "run", options).add_scalar("loss", 0.5, 1);
  const std::string message =
      semitone::test::message_of<FileError>([&] { const RunLog log(folder / "run", options); });
  EXPECT_THAT(message, ::testing::HasSubstr("a directory without a run"));
  EXPECT_THAT(message, ::testing::HasSubstr((folder / "run").string()));
  EXPECT_EQ(events_files(folder / "run").size(), 1U);
}

TEST(ResumedRun, IsRefusedForAnotherTable) {
  const TemporaryFolder folder;
  for (const char* const table : {"epoch,loss\n1,0.5\n", "epoch,loss\n1,0.5", "epoch,loss", "s,"}) {
    write_text(folder / "metrics.csv", table);
    expect_error([&] { const RunLog log(folder.path()); },
                 {"step,wall_time,name,value", "another first line"});
    EXPECT_EQ(read_text(folder / "metrics.csv"), table);
  }
}

// Names that data sets have, too.
TEST(ResumedRun, IsRefusedForLinesOfOthers) {
  const TemporaryFolder folder;
  for (const char* const name : {"texts.jsonl", "samples.jsonl"}) {
    for (const std::string text :
         {"{\"text\":\"one\"}\n{\"text\":\"two\"}", "one", "{\"text\":1}\n"}) {
      for (const bool append : {true, false}) {
        write_text(folder / name, text);
        expect_error([&] { const RunLog log(folder.path(), RunLogOptions().append(append)); },
                     {"lines of a run", (folder / name).string(), "another first line",
                      "another directory"});
        EXPECT_EQ(read_text(folder / name), text);
      }
    }
    std::filesystem::remove(folder / name);
  }
}

TEST(ResumedRun, OfAStartThatLeftOnlyItsModelIsANewRun) {
  const TemporaryFolder folder;
  write_text(folder / "samples.jsonl", "{\"step\":1,\"wall_time\":2e9,\"kind\":\"model\"}\n");
  RunLog log(folder.path(), RunLogOptions().append(false));
  log.add_scalar("loss", 0.5, 1);
  log.close();
  EXPECT_EQ(samples_in(folder.path()).at(0).at("kind"), "model");
}

TEST(ResumedRun, OfAStartThatLeftNoValuesIsANewRun) {
  const TemporaryFolder folder;
  for (const char* const left : {"", "step,wall", "step,wall_time,name,value\n"}) {
    write_text(folder / "metrics.csv", left);
    {
      RunLog log(folder.path(), RunLogOptions().append(false));
      log.add_scalar("loss", 0.5, 1);
    }
    EXPECT_THAT(read_text(folder / "metrics.csv"),
                AllOf(StartsWith("step,wall_time,name,value\n1,"), EndsWith(",loss,0.5\n")));
  }
}

TEST(Run, IsWrittenByOneLogAtATime) {
  const TemporaryFolder folder;
  {
    const RunLog log(folder.path());
    expect_error([&] { const RunLog second(folder.path()); },
                 {"nothing else writes to", "RunLogOptions::rank"});
  }
  const RunLog later(folder.path());
}

TEST(Run, IsWrittenByRank0) {
  const TemporaryFolder folder;
  Environment environment({"RANK", "WORLD_SIZE"});
  environment.set({{"RANK", "1"}, {"WORLD_SIZE", "2"}});
  RunLog log(folder / "run");
  EXPECT_FALSE(log.writes());
  log.set_step(1);
  log.add_scalar("loss", 1);
  log.add_histogram("a", at::Tensor());  // is not looked at
  log.flush();
  expect_error([&] { log.add_scalar("", 1); }, {"a name"});
  log.close();
  EXPECT_FALSE(std::filesystem::exists(folder / "run"));
  environment.set({{"RANK", "0"}});
  EXPECT_TRUE(RunLog(folder / "run").writes());
  EXPECT_EQ(json_in(folder / "run" / "run.json").at("environment").at("world_size"), 2);
}

TEST(Run, IsWrittenByEveryRankThatSaysSo) {
  const TemporaryFolder folder;
  const auto options = RunLogOptions().world_size(2).every_rank(true);
  RunLog first(folder.path(), RunLogOptions(options).rank(0));
  RunLog second(folder.path(), RunLogOptions(options).rank(1));
  second.add_scalar("loss", 1);
  second.close();
  EXPECT_THAT(metrics_in(folder / "rank-1"), ElementsAre("0,loss,1"));
  EXPECT_EQ(json_in(folder / "rank-1" / "run.json").at("environment").at("rank"), 1);
}

TEST(Run, NeedsARankThatIsANumber) {
  const TemporaryFolder folder;
  Environment environment({"RANK", "WORLD_SIZE"});
  environment.set({{"RANK", "first"}});
  expect_error([&] { const RunLog log(folder.path()); }, {"RANK from 0", "'first'"});
  expect_error([&] { const RunLog log(folder.path(), RunLogOptions().rank(-1)); },
               {"RANK from 0", "'-1'"});
  expect_error([&] { const RunLog log(folder.path(), RunLogOptions().rank(0).world_size(0)); },
               {"WORLD_SIZE from 1", "'0'"});
}

}  // namespace
}  // namespace semitone::report
