// `semitone train --log-dir`, --config and --print-config.

#include "semitone/core/version.h"
#include "tests/apps/cli_fixture.h"
#include "tests/apps/semitone_command.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <set>
#include <string>

namespace semitone::train_record_test {
namespace {

using launch::ProcessResult;
using nlohmann::json;
using test::CliTest;
using test::expect_failure;
using test::lines_of;
using test::read_text;
using test::run_semitone;
using test::Words;
using test::write_text;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

json json_in(const std::filesystem::path& path) {
  return json::parse(read_text(path));
}

// The steps with a value of this name in metrics.csv.
std::vector<int> steps_of(const std::filesystem::path& directory, const std::string& name) {
  std::vector<int> steps;
  for (const std::string& line : lines_of(read_text(directory / "metrics.csv"))) {
    if (line.find("," + name + ",") != std::string::npos) steps.push_back(std::stoi(line));
  }
  return steps;
}

int events_files(const std::filesystem::path& directory) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    count += entry.path().filename().string().starts_with("events.out.tfevents.") ? 1 : 0;
  return count;
}

class TrainRecord : public CliTest {
 protected:
  std::string run() const { return (folder_ / "run").string(); }
};

TEST_F(TrainRecord, HasTheMetricsTheConfigurationAndTheEnd) {
  const ProcessResult finished = run_semitone(
      train({"--log-dir", run(), "--epochs", "2", "--optimizer", "adam", "--lr", "0.001"}));
  ASSERT_TRUE(finished.status.success()) << finished.err;
  EXPECT_THAT(steps_of(run(), "train/loss"), ElementsAre(10, 20, 30, 40));
  EXPECT_THAT(steps_of(run(), "train/lr"), ElementsAre(10, 20, 30, 40));
  EXPECT_THAT(steps_of(run(), "train/images_per_second"), ElementsAre(10, 20, 30, 40));
  EXPECT_THAT(steps_of(run(), "train/epoch_loss"), ElementsAre(20, 40));
  EXPECT_THAT(steps_of(run(), "amp/skipped_steps"), ElementsAre(20, 40));
  EXPECT_THAT(steps_of(run(), "test/accuracy"), ElementsAre(40));
  EXPECT_EQ(events_files(run()), 1);
  const json record = json_in(run() + "/run.json");
  EXPECT_EQ(record.at("outcome"), "finished");
  EXPECT_EQ(record.at("environment").at("threads"), 1);
  EXPECT_EQ(record.at("environment").at("semitone"), version());
  const json& config = record.at("config");
  EXPECT_EQ(config.at("lr"), "0.001");
  EXPECT_EQ(config.at("optimizer"), "adam");
  EXPECT_EQ(config.at("seed"), "0");  // a default
  EXPECT_EQ(config.at("opt-level"), "O1");
  EXPECT_EQ(config.at("dtype"), "bfloat16");
}

TEST_F(TrainRecord, HasSkippedStepsWithTheParameter) {
  const ProcessResult finished = run_semitone(train(
      {"--log-dir", run(), "--dtype", "fp16", "--loss-scale", "1e20", "--limit-batches", "3"}));
  ASSERT_TRUE(finished.status.success()) << finished.err;
  EXPECT_THAT(steps_of(run(), "amp/skipped_steps"), ElementsAre(1, 2, 3, 3));
  const Words texts = lines_of(read_text(run() + "/texts.jsonl"));
  ASSERT_EQ(texts.size(), 3U);
  EXPECT_EQ(json::parse(texts[1]).at("step"), 2);
  EXPECT_THAT(json::parse(texts[1]).at("text").get<std::string>(),
              HasSubstr("the gradients of 'fc.bias' and of 9 other parameters are not finite"));
}

TEST_F(TrainRecord, ContinuesWithTheTraining) {
  const Words more{"--log-dir",  run(),     "--checkpoint-dir", (folder_ / "checkpoints").string(),
                   "--resume",   "auto",    "--epochs",         "2",
                   "--schedule", "constant"};
  auto first = more;
  first.insert(first.end(), {"--max-steps", "15"});
  ASSERT_TRUE(run_semitone(train(first)).status.success());
  const ProcessResult second = run_semitone(train(more));
  ASSERT_TRUE(second.status.success()) << second.err;
  EXPECT_THAT(steps_of(run(), "train/loss"), ElementsAre(10, 20, 30, 40));
  EXPECT_EQ(events_files(run()), 2);
  EXPECT_EQ(json_in(run() + "/run-2.json").at("outcome"), "finished");
}

TEST_F(TrainRecord, MayStandBesideTheCheckpoints) {
  const Words words = train({"--log-dir", run(), "--checkpoint-dir", run(), "--limit-batches", "3",
                             "--resume", "auto", "--save-every", "1"});
  ASSERT_TRUE(run_semitone(words).status.success());
  const ProcessResult again = run_semitone(words);  // only tested
  EXPECT_TRUE(again.status.success()) << again.err;
  EXPECT_THAT(steps_of(run(), "test/accuracy"), ElementsAre(3, 3));
}

// Also where nodes had joined, which leaves TORCHELASTIC_RESTART_COUNT as it was.
TEST_F(TrainRecord, ContinuesWhereALauncherStartsTheTrainingAgain) {
  const Words words = train({"--log-dir", run(), "--limit-batches", "2"});
  ASSERT_TRUE(run_semitone(words).status.success());
  for (const std::string name : {"SEMITONE_ATTEMPT", "TORCHELASTIC_RESTART_COUNT"}) {
    const ProcessResult again = launch::run(
        test::semitone_command(words).environment(name, "1").err(launch::Output::capture));
    EXPECT_TRUE(again.status.success()) << again.err;
  }
  EXPECT_EQ(events_files(run()), 3);
}

TEST_F(TrainRecord, OfAnotherTrainingIsNotContinued) {
  const Words words = train({"--log-dir", run(), "--limit-batches", "2"});
  ASSERT_TRUE(run_semitone(words).status.success());
  const ProcessResult second = run_semitone(words);
  EXPECT_EQ(second.status.code, 1);
  EXPECT_THAT(second.err,
              HasSubstr("[cli.train] expected a --log-dir without a run, got '" + run()));
  EXPECT_EQ(events_files(run()), 1);
}

TEST_F(TrainRecord, TakesThePlaceOfAStartThatLeftNoValues) {
  std::filesystem::create_directories(run());
  write_text(run() + "/run.json", "{}");
  const ProcessResult finished = run_semitone(train({"--log-dir", run(), "--limit-batches", "2"}));
  EXPECT_TRUE(finished.status.success()) << finished.err;
}

TEST_F(TrainRecord, OfAnotherJobIsNotContinuedByRestarts) {
  const Words words = train({"--log-dir", run(), "--limit-batches", "2"});
  const auto start = [&](const std::string& job, const std::string& attempt) {
    return launch::run(test::semitone_command(words)
                           .environment("TORCHELASTIC_RUN_ID", job)
                           .environment("SEMITONE_ATTEMPT", attempt)
                           .err(launch::Output::capture));
  };
  ASSERT_TRUE(start("one", "0").status.success());
  EXPECT_EQ(json_in(run() + "/run.json").at("environment").at("job"), "one");
  for (const std::string attempt : {"0", "1"}) {
    const ProcessResult other = start("other", attempt);
    EXPECT_EQ(other.status.code, 1);
    EXPECT_THAT(other.err, HasSubstr("expected a --log-dir without a run"));
  }
  EXPECT_EQ(events_files(run()), 1);
  EXPECT_TRUE(start("one", "1").status.success());
  EXPECT_EQ(events_files(run()), 2);
}

TEST_F(TrainRecord, IsNotStartedIfItCannotBeWritten) {
  const ProcessResult finished = run_semitone(train({"--log-dir", "/proc/no/such"}));
  EXPECT_EQ(finished.status.code, 1);
  EXPECT_THAT(finished.err, HasSubstr("/proc/no/such"));
  EXPECT_THAT(finished.err, Not(HasSubstr("epoch")));
}

TEST_F(TrainRecord, SaysWhyATrainingFailed) {
  const ProcessResult finished =
      run_semitone(train({"--log-dir", run(), "--opt-level", "O0", "--lr", "1e30"}));
  EXPECT_EQ(finished.status.code, 3);
  const json record = json_in(run() + "/run.json");
  EXPECT_EQ(record.at("outcome"), "failed");
  EXPECT_THAT(record.at("reason").get<std::string>(),
              HasSubstr("[train.trainer] expected a finite"));
}

TEST_F(TrainRecord, IsOneOfEachLevel) {
  const ProcessResult finished =
      run_semitone(train({"--log-dir", run(), "--opt-level", "all", "--limit-batches", "2"}));
  ASSERT_TRUE(finished.status.success()) << finished.err;
  for (const char* const level : {"O0", "O1", "O2", "O3"}) {
    EXPECT_EQ(json_in(folder_ / "run" / level / "run.json").at("config").at("opt-level"), level);
    EXPECT_THAT(steps_of(folder_ / "run" / level, "test/loss"), ElementsAre(2));
  }
}

TEST_F(TrainRecord, IsWrittenByOneOfTwoProcesses) {
  const ProcessResult finished =
      run_semitone(train({"--log-dir", run(), "--nproc", "2", "--limit-batches", "2"}));
  ASSERT_TRUE(finished.status.success()) << finished.err;
  EXPECT_EQ(json_in(run() + "/run.json").at("environment").at("world_size"), 2);
  EXPECT_EQ(events_files(run()), 1);
}

// Neither a file nor the command line of the first process may be lost on the way to the others.
TEST_F(TrainRecord, HasTheMarksThatTheProcessesHad) {
  write_text(folder_ / "config.toml", "sync-bn=true\nquiet=true\n");
  const ProcessResult finished =
      run_semitone(train({"--log-dir", run(), "--config", (folder_ / "config.toml").string(),
                          "--sync-bn=false", "--nproc", "2", "--limit-batches", "2"}));
  ASSERT_TRUE(finished.status.success()) << finished.err;
  EXPECT_EQ(json_in(run() + "/run.json").at("config").at("sync-bn"), "false");
}

TEST_F(TrainRecord, HasTheBatchSizeOfEachProcess) {
  Words words{"train",
              "--data",
              data_.path().string(),
              "--global-batch-size",
              "40",
              "--nproc",
              "2",
              "--limit-batches",
              "2",
              "--log-dir",
              run()};
  const ProcessResult finished = run_semitone(words);
  ASSERT_TRUE(finished.status.success()) << finished.err;
  EXPECT_EQ(json_in(run() + "/run.json").at("config").at("batch-size"), "20");
}

class TrainConfig : public CliTest {
 protected:
  // Writes a file and returns its path.
  std::string file(const std::string& text) const {
    write_text(folder_ / "config.toml", text);
    return (folder_ / "config.toml").string();
  }
  // What --print-config prints.
  std::string printed(Words words) const {
    words.insert(words.begin(), "train");
    words.emplace_back("--print-config");
    const ProcessResult finished = run_semitone(words);
    EXPECT_TRUE(finished.status.success()) << finished.err;
    return finished.out;
  }
};

TEST_F(TrainConfig, IsThatOfTheFlags) {
  const std::string out = printed({"--epochs", "3", "--sync-bn", "--data", "my data"});
  const Words lines = lines_of(out);
  for (const char* const line :
       {"epochs=3", "sync-bn=true", "data=\"my data\"", "# lr=0.05", "# opt-level=\"O1\""})
    EXPECT_EQ(std::count(lines.begin(), lines.end(), line), 1) << line << " in\n" << out;
}

TEST_F(TrainConfig, RoundTrips) {
  const std::string first =
      printed({"--epochs", "3", "--lr", "1e-3", "--sync-bn", "--quiet", "--data", "my data",
               "--save-every", "5min", "--checkpoint-dir", "a'b", "-g", "2", "--loss-scale",
               "dynamic", "--opt-level", "O2"});
  EXPECT_EQ(printed({"--config", file(first)}), first);
  EXPECT_EQ(printed({"--config", file(printed({}))}), printed({}));
}

TEST_F(TrainConfig, SetsTheFlagsThatTheCommandLineHasNot) {
  const std::string config = file("# a comment\nlr = 0.5\n[train]\nepochs = 4\nquiet = false\n");
  const Words lines = lines_of(printed({"--config", config, "--lr", "0.25"}));
  const std::set<std::string> found(lines.begin(), lines.end());
  EXPECT_TRUE(found.contains("lr=0.25"));
  EXPECT_TRUE(found.contains("epochs=4"));
  EXPECT_TRUE(found.contains("# quiet=false"));
}

TEST_F(TrainConfig, TrainsAsTheFlagsDo) {
  const auto result = [](const ProcessResult& finished) {
    EXPECT_TRUE(finished.status.success()) << finished.err;
    const json level = json::parse(finished.out).at(0);
    return std::pair(level.at("test_loss").get<double>(), level.at("steps").get<int>());
  };
  const std::string config = file("opt-level = \"O2\"\nlimit-batches = 7\nlr = 0.01\n");
  EXPECT_EQ(result(run_semitone(train({"--json", "--config", config}))),
            result(run_semitone(
                train({"--json", "--opt-level", "O2", "--limit-batches", "7", "--lr", "0.01"}))));
  // The processes of all levels get the file's flags too.
  const ProcessResult all =
      run_semitone(train({"--json", "--config", file("opt-level=\"all\"\nlimit-batches=7\n")}));
  ASSERT_TRUE(all.status.success()) << all.err;
  for (const json& level : json::parse(all.out)) EXPECT_EQ(level.at("steps"), 7);
}

TEST_F(TrainConfig, RefusesWhatIsNoFlagOrNoValue) {
  const auto expect = [&](const std::string& text, const std::string& message) {
    expect_failure(run_semitone(train({"--config", file(text)})), 2, message);
  };
  expect("epoch = 3\n", "'epoch' — did you mean '--epochs'?");
  expect("nonsense = 3\n", "[cli.train] expected flags of this command in '");
  expect("[bench]\nlr = 3\n", "expected the section [train] in line 1 of '");
  expect("bench.lr = 3\n", "'bench.lr'");
  expect("json = \"a\"\n", "'json' — give --json on the command line");
  expect("config = \"a\"\n", "give --config on the command line");
  expect("as-part = true\n", "'as-part'");
  expect("lr = -1\n", "expected --lr above 0");
  expect("log-dir\n", "expected a value for 'log-dir' in '");
  expect("lr = [1, 2]\n", "expected one value for 'lr'");
  expect("lr = 1\nepochs = 2\nlr = 2\n", "got 'lr' twice");
  expect("quiet = false\nquiet = true\n", "got 'quiet' twice");
  expect("quiet = 3\n", "expected quiet in '");
  expect("\nlr 0.5\n", "expected NAME = VALUE in line 2 of '");
  expect("lr =\n", "expected a value for 'lr' in line 1 of '");
  expect("lr = 0.5#a\n", "expected one value for 'lr'");
  expect("data = my data\n", "got 'my data' — a value that is more than a word needs quotes");
  // No part of the value may be lost.
  expect("data = \"my data\"s\n", "expected one value for 'data'");
  expect("data = \"my data\n", "expected one value for 'data'");
  expect("data = \"my\x1b[1mdata\"\n", "expected no control characters in line 1 of '");
}

TEST_F(TrainConfig, RefusesWhatIsTooLarge) {
  const auto refused = [&](const std::string& text) {
    return run_semitone({"train", "--config", file(text)});
  };
  std::string section = "[";
  for (int i = 0; i < 30'000; ++i) section += "a.";
  expect_failure(refused(section + "]\nlr = 1\n"), 2, "expected the section [train]");
  expect_failure(refused(std::string(70'000, '#')), 1, "expected at most 65536 bytes of flags");
  expect_failure(run_semitone({"train", "--config", "/dev/zero"}), 1, "expected at most 65536");
}

TEST_F(TrainConfig, TakesAQuotedValueAsItIs) {
  for (const std::string value : {"a # b", "a\\nb", "[a, b]", " a ", "a'b", "1e3 m"}) {
    const Words lines = lines_of(printed({"--config", file("data = \"" + value + "\"  # a\n")}));
    EXPECT_EQ(std::count(lines.begin(), lines.end(), "data=\"" + value + '"'), 1) << value;
  }
  const Words lines = lines_of(printed({"--config", file("data = 'a \"#\" b'\r\n")}));
  EXPECT_EQ(std::count(lines.begin(), lines.end(), "data='a \"#\" b'"), 1);
}

TEST_F(TrainConfig, MustBeReadable) {
  expect_failure(run_semitone(train({"--config", "/no/such"})), 1,
                 "[cli.train] expected to read '/no/such', got No such file or directory");
  expect_failure(run_semitone(train({"--config", folder_.path().string()})), 1,
                 "got Is a directory");
}

TEST_F(TrainRecord, SamplesTheModelForTheReport) {
  const ProcessResult trained = run_semitone(
      train({"--log-dir", run(), "--record-every", "8", "--dtype", "fp16", "--opt-level", "O2"}));
  ASSERT_TRUE(trained.status.success()) << trained.err;
  const ProcessResult reported = run_semitone({"report", run(), "--json", "--html"});
  ASSERT_TRUE(reported.status.success()) << reported.err;
  const json report = json::parse(reported.out);
  EXPECT_EQ(report.at("run").at("samples"), 3);  // of 20 steps: 1, 9 and 17
  EXPECT_EQ(report.at("run").at("dtype"), "float16");
  std::set<std::string> names;
  for (const json& parameter : report.at("parameters")) {
    names.insert(parameter.at("name"));
    EXPECT_FALSE(parameter.at("gradient").is_null()) << parameter.at("name");
    EXPECT_GT(parameter.at("updates"), 0) << parameter.at("name");
  }
  EXPECT_EQ(names.size(), 10U);
  EXPECT_GT(report.at("phases").at("backward"), 0);
  EXPECT_GT(report.at("phases").at("optimizer"), 0);
  EXPECT_GT(report.at("memory").at("masters"), 0);
  EXPECT_THAT(read_text(folder_ / "run" / "report.html"), HasSubstr("conv1.weight"));
}

// At O1 in bf16, the default, there is no loss scale.
TEST_F(TrainRecord, TellsOfGradientsWithoutALossScale) {
  for (const Words& flags : {Words{"--dtype", "bf16", "--opt-level", "O1"},
                             Words{"--dtype", "bf16", "--opt-level", "O3"}}) {
    SCOPED_TRACE(flags.back());
    Words words = train({"--log-dir", run(), "--record-every", "8", "--lr", "0.001"});
    words.insert(words.end(), flags.begin(), flags.end());
    const ProcessResult trained = run_semitone(words);
    ASSERT_TRUE(trained.status.success()) << trained.err;
    const ProcessResult reported = run_semitone({"report", run(), "--json"});
    ASSERT_TRUE(reported.status.success()) << reported.err;
    const json report = json::parse(reported.out);
    for (const json& parameter : report.at("parameters"))
      EXPECT_FALSE(parameter.at("shares").is_null()) << parameter.at("name");
    const auto& verdicts = report.at("verdicts");
    EXPECT_TRUE(std::any_of(verdicts.begin(), verdicts.end(),
                            [](const json& one) { return one.at("id") == "underflow"; }));
    std::filesystem::remove_all(folder_ / "run");
  }
}

TEST_F(TrainRecord, CanBeWithoutSamples) {
  ASSERT_TRUE(run_semitone(train({"--log-dir", run(), "--record-every", "0"})).status.success());
  EXPECT_THAT(read_text(folder_ / "run" / "samples.jsonl"), Not(HasSubstr("sample\"")));
  expect_failure(run_semitone(train({"--record-every", "8"})), 2, "--log-dir with --record-every");
}

}  // namespace
}  // namespace semitone::train_record_test
