#include "semitone/report/run_log.h"

#include "semitone/core/version.h"
#include "src/core/usable_cores.h"
#include "tests/report/run_directory.h"
#include "tests/support/errors.h"

#include <ATen/Parallel.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <gmock/gmock.h>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace semitone::report {
namespace {

using semitone::test::expect_error;
using semitone::test::TemporaryFolder;
using test::events_in;
using test::json_in;
using test::metrics_in;
using test::texts_in;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(RunLog, WritesALineForEachScalar) {
  const TemporaryFolder folder;
  RunLog log(folder.path());
  log.add_scalar("loss", 0.1);
  log.set_step(1);
  log.add_scalar("loss", 1.0 / 3);
  log.add_scalar("accuracy", 1e300, 12);
  log.add_scalar("loss", -0.5);
  log.close();
  EXPECT_THAT(metrics_in(folder.path()), ElementsAre("0,loss,0.1", "1,loss,0.3333333333333333",
                                                     "12,accuracy,1e+300", "1,loss,-0.5"));
}

TEST(RunLog, WritesInfinityAndNanAsSuch) {
  const TemporaryFolder folder;
  RunLog log(folder.path());
  for (const double value : {kInfinity, -kInfinity, kNan, -kNan}) log.add_scalar("loss", value);
  log.close();
  EXPECT_THAT(metrics_in(folder.path()),
              ElementsAre("0,loss,inf", "0,loss,-inf", "0,loss,nan", "0,loss,nan"));
  const auto events = events_in(folder.path()).named("loss");
  ASSERT_EQ(events.size(), 4U);
  EXPECT_EQ(events[0].scalar, kInfinity);
  EXPECT_EQ(events[1].scalar, -kInfinity);
  EXPECT_TRUE(std::isnan(events[2].scalar.value()));
}

TEST(RunLog, QuotesNamesThatHaveCommasOrQuotes) {
  const TemporaryFolder folder;
  RunLog log(folder.path());
  log.add_scalar("top 1, \"exact\"", 1);
  log.close();
  EXPECT_THAT(metrics_in(folder.path()), ElementsAre("0,\"top 1, \"\"exact\"\"\",1"));
}

TEST(RunLog, WritesTensorBoardsRecords) {
  const TemporaryFolder folder;
  RunLog log(folder.path());
  log.add_scalar("loss", 0.1, 3);
  log.add_scalar("loss", 1e39, 4);  // beyond fp32
  log.add_text("note", "hello", 5);
  log.close();
  const auto events = events_in(folder.path());
  EXPECT_FALSE(events.is_cut_off);
  ASSERT_EQ(events.all.size(), 4U);
  EXPECT_EQ(events.all[0].file_version, "brain.Event:2");
  EXPECT_EQ(events.all[1].name, "loss");
  EXPECT_EQ(events.all[1].step, 3);
  EXPECT_EQ(events.all[1].scalar, 0.1F);
  EXPECT_GT(events.all[1].time, 1.7e9);
  EXPECT_EQ(events.all[2].scalar, std::numeric_limits<float>::infinity());
  EXPECT_EQ(events.all[3].name, "note/text_summary");
  EXPECT_EQ(events.all[3].plugin, "text");
  EXPECT_EQ(events.all[3].text, "hello");
  EXPECT_EQ(events.all[3].step, 5);
}

TEST(RunLog, WritesTextsWithAnyBytes) {
  const TemporaryFolder folder;
  RunLog log(folder.path());
  log.add_text("note", "two\nlines, \"quoted\"", 1);
  log.add_text("note", "no UTF-8: \xff.", 2);
  log.close();
  EXPECT_THAT(texts_in(folder.path()),
              ElementsAre("1 note: two\nlines, \"quoted\"", "2 note: no UTF-8: \xef\xbf\xbd."));
  EXPECT_EQ(events_in(folder.path()).all.back().text, "no UTF-8: \xef\xbf\xbd.");
}

TEST(RunLog, DescribesTheRun) {
  const TemporaryFolder folder;
  {
    RunLog log(folder / "a" / "b", RunLogOptions().config({{"lr", "0.1"}, {"a|b", "c"}}));
    const auto before = json_in(folder / "a" / "b" / "run.json");
    EXPECT_EQ(before.at("outcome"), "running");
    EXPECT_TRUE(before.at("end_time").is_null());
  }
  const auto json = json_in(folder / "a" / "b" / "run.json");
  EXPECT_EQ(json.at("outcome"), "finished");
  EXPECT_FALSE(json.contains("reason"));
  EXPECT_EQ(json.at("config"), (nlohmann::json{{"lr", "0.1"}, {"a|b", "c"}}));
  EXPECT_THAT(json.at("start_time").get<std::string>(), ::testing::MatchesRegex("2.*T.*Z"));
  EXPECT_GE(json.at("end_time").get<std::string>(), json.at("start_time").get<std::string>());
  const auto& environment = json.at("environment");
  EXPECT_EQ(environment.at("semitone"), version());
  EXPECT_EQ(environment.at("libtorch"), libtorch_version());
  EXPECT_EQ(environment.at("threads"), at::get_num_threads());
  EXPECT_EQ(environment.at("cores"), usable_cores());
  EXPECT_EQ(environment.at("all_cores"), all_cores());
  EXPECT_EQ(environment.at("rank"), 0);
  EXPECT_EQ(environment.at("world_size"), 1);
  const auto config = events_in(folder / "a" / "b").named("config/text_summary");
  ASSERT_EQ(config.size(), 1U);
  EXPECT_EQ(config[0].text, "| setting | value |\n|---|---|\n| a\\|b | c |\n| lr | 0.1 |\n");
}

TEST(RunLog, TellsHowTheRunEnded) {
  const TemporaryFolder folder;
  RunLog(folder / "stopped").close(Outcome::stopped, "SIGTERM");
  EXPECT_EQ(json_in(folder / "stopped" / "run.json").at("outcome"), "stopped");
  EXPECT_EQ(json_in(folder / "stopped" / "run.json").at("reason"), "SIGTERM");
  RunLog(folder / "failed").close(Outcome::failed, "bad byte: \xff");
  EXPECT_EQ(json_in(folder / "failed" / "run.json").at("reason"), "bad byte: \xef\xbf\xbd");
  try {
    const RunLog log(folder / "thrown");
    throw std::runtime_error("an error of the training");
  } catch (const std::runtime_error&) {
    EXPECT_EQ(json_in(folder / "thrown" / "run.json").at("outcome"), "failed");
  }
}

TEST(RunLog, KeepsLinesInMemoryUntilTheNextFlush) {
  const TemporaryFolder folder;
  RunLog log(folder.path(), RunLogOptions().flush_interval(std::chrono::hours(1)));
  log.add_scalar("loss", 1);
  EXPECT_THAT(metrics_in(folder.path()), IsEmpty());
  EXPECT_EQ(events_in(folder.path()).all.size(), 1U);
  log.flush();
  EXPECT_THAT(metrics_in(folder.path()), ElementsAre("0,loss,1"));
  EXPECT_EQ(events_in(folder.path()).all.size(), 2U);
}

TEST(RunLog, WritesAMebibyteAtOnce) {
  const TemporaryFolder folder;
  RunLog log(folder.path(), RunLogOptions().flush_interval(std::chrono::hours(1)));
  log.add_text("note", std::string(1 << 20, 'x'));
  EXPECT_EQ(texts_in(folder.path()).size(), 1U);
}

TEST(RunLog, WritesEachLineAtOnceWithoutAnInterval) {
  const TemporaryFolder folder;
  RunLog log(folder.path(), RunLogOptions().flush_interval(std::chrono::seconds(0)));
  log.add_scalar("loss", 1);
  EXPECT_THAT(metrics_in(folder.path()), ElementsAre("0,loss,1"));
}

TEST(RunLog, RefusesNamesAndStepsThatNoFileCanHave) {
  const TemporaryFolder folder;
  RunLog log(folder.path());
  for (const char* const name : {"", "a\nb", " a", "a ", "\xff"}) {
    expect_error([&] { log.add_scalar(name, 1); }, {"[report.run_log]", "a name of visible"});
    expect_error([&] { log.add_text(name, ""); }, {"a name of visible"});
    expect_error([&] { log.add_histogram(name, torch::ones(1)); }, {"a name of visible"});
  }
  expect_error([&] { log.set_step(-1); }, {"a step from 0", "-1"});
  expect_error([&] { log.add_scalar("loss", 1, -2); }, {"a step from 0", "-2"});
  log.close();
  EXPECT_THAT(metrics_in(folder.path()), IsEmpty());
}

TEST(RunLog, RefusesWhatIsAddedAfterTheEnd) {
  const TemporaryFolder folder;
  RunLog log(folder.path());
  log.close();
  log.close(Outcome::failed);  // does nothing
  expect_error([&] { log.add_scalar("loss", 1); }, {"close()"});
  expect_error([&] { log.set_step(1); }, {"close()"});
  expect_error([&] { log.flush(); }, {"close()"});
  EXPECT_EQ(json_in(folder / "run.json").at("outcome"), "finished");
}

TEST(RunLog, HasHistogramsOfAModel) {
  const TemporaryFolder folder;
  RunLog log(folder.path());
  torch::nn::Linear model(3, 2);
  model->bias.requires_grad_(false);
  model->forward(torch::ones({1, 3})).sum().backward();
  log.add_histograms(*model, 7);
  log.close();
  const auto events = events_in(folder.path());
  ASSERT_EQ(events.all.size(), 4U);
  const auto gradient = events.named("gradients/weight").at(0);
  EXPECT_EQ(gradient.step, 7);
  EXPECT_EQ(gradient.histogram->num, 6);
  EXPECT_EQ(gradient.histogram->min, 1);
  EXPECT_EQ(events.named("parameters/weight").at(0).histogram->num, 6);
  EXPECT_EQ(events.named("parameters/bias").at(0).histogram->num, 2);
}

TEST(RunLog, CountsWhatAHistogramLeavesOut) {
  const TemporaryFolder folder;
  RunLog log(folder.path());
  log.add_histogram("a", torch::tensor({1.0, kNan, kInfinity}), 1);
  log.add_histogram("b", torch::tensor({kNan}), 1);
  log.add_histogram("c", torch::tensor({1.0}), 1);
  log.close();
  EXPECT_THAT(metrics_in(folder.path()), ElementsAre("1,a/non_finite,2", "1,b/non_finite,1"));
  const auto events = events_in(folder.path());
  EXPECT_EQ(events.named("a").at(0).histogram->num, 1);
  EXPECT_THAT(events.named("b"), IsEmpty());
}

TEST(RunLog, TakesValuesOfSeveralThreads) {
  constexpr int kCount = 2000;
  const TemporaryFolder folder;
  RunLog log(folder.path(), RunLogOptions().flush_interval(std::chrono::milliseconds(1)));
  const auto add = [&](const std::string& name) {
    for (int i = 0; i < kCount; ++i) log.add_scalar(name, i, i);
  };
  std::thread first(add, "first");
  std::thread second(add, "second");
  first.join();
  second.join();
  log.close();
  std::vector<std::string> expected;
  for (int i = 0; i < kCount; ++i) {
    for (const char* const name : {"first", "second"})
      expected.push_back(std::to_string(i) + "," + name + "," + std::to_string(i));
  }
  EXPECT_THAT(metrics_in(folder.path()), ::testing::UnorderedElementsAreArray(expected));
  const auto events = events_in(folder.path());
  EXPECT_EQ(events.named("first").size(), std::size_t{kCount});
  EXPECT_EQ(events.named("second").size(), std::size_t{kCount});
}

}  // namespace
}  // namespace semitone::report
