#include "semitone/report/run_log.h"
#include "tests/report/run_directory.h"

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include <limits>
#include <string>

namespace semitone::report {
namespace {

using semitone::test::TemporaryFolder;
using test::events_in;
using test::metrics_in;
using test::samples_in;
using test::texts_in;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

events::LossScaleUpdated update(double before, double after, std::int64_t loss_id = 0) {
  return {.loss_id = loss_id, .before = before, .after = after, .found_inf = after < before};
}

events::StepSkipped skip(const std::string& parameter, std::int64_t total,
                         std::int64_t non_finite = 1) {
  return {.parameter = parameter,
          .non_finite = non_finite,
          .consecutive = 1,
          .total = total,
          .loss_scale = 65536};
}

TEST(RunLogEvents, RecordLossScalesWhereTheyChange) {
  const TemporaryFolder folder;
  RunLog log(folder.path());
  const double scales[] = {8, 8, 8, 4, 4, 8};
  for (std::int64_t step = 1; step < 6; ++step) {
    log.set_step(step);
    events::emit(update(scales[step - 1], scales[step]));
  }
  events::emit(update(2, 1, 1));
  log.close();
  EXPECT_THAT(metrics_in(folder.path()), ElementsAre("1,amp/loss_scale,8", "3,amp/loss_scale,4",
                                                     "5,amp/loss_scale,8", "5,amp/loss_scale_1,1"));
}

TEST(RunLogEvents, WithoutAStepWaitForTheNextValueThatHasOne) {
  const TemporaryFolder folder;
  RunLog log(folder.path());
  events::emit(update(8, 4));
  log.add_text("note", "the first samples look fine");
  log.add_scalar("train/loss", 0.5, 100);
  log.close();
  EXPECT_THAT(metrics_in(folder.path()), ElementsAre("100,amp/loss_scale,4", "100,train/loss,0.5"));
}

TEST(RunLogEvents, TellTheScalesOfTwoScalersApart) {
  const TemporaryFolder folder;
  RunLog log(folder.path());
  log.set_step(1);
  events::emit(update(8, 8));
  events::emit(update(64, 64));  // of another scaler, whose loss_id is 0 as well
  log.set_step(2);
  events::emit(update(8, 4));
  events::emit(update(64, 64));
  log.set_step(3);
  events::emit(update(4, 4));
  events::emit(update(64, 128));
  events::emit(update(2, 2, 1));  // another loss: its number is taken
  log.close();
  EXPECT_THAT(metrics_in(folder.path()),
              ElementsAre("1,amp/loss_scale,8", "1,amp/loss_scale_1,64", "2,amp/loss_scale,4",
                          "3,amp/loss_scale_1,128", "3,amp/loss_scale_2,2"));
}

TEST(RunLogEvents, RecordSkippedStepsWithTheParameter) {
  const TemporaryFolder folder;
  RunLog log(folder.path());
  log.set_step(3);
  events::emit(skip("fc2.weight", 1));
  log.set_step(4);
  events::emit(skip("fc2.weight", 2, 3));
  events::emit(skip("", 3, 0));
  log.close();
  EXPECT_THAT(
      metrics_in(folder.path()),
      ElementsAre("3,amp/skipped_steps,1", "4,amp/skipped_steps,2", "4,amp/skipped_steps,3"));
  const std::string rest = "; loss scale 65536, 1 skipped in a row";
  EXPECT_THAT(
      texts_in(folder.path()),
      ElementsAre("3 amp/skipped_step: the gradient of 'fc2.weight' is not finite" + rest,
                  "4 amp/skipped_step: the gradients of 'fc2.weight' and of 2 other parameters are "
                  "not finite" +
                      rest,
                  "4 amp/skipped_step: a gradient is not finite on another rank" + rest));
  EXPECT_EQ(events_in(folder.path()).named("amp/skipped_step/text_summary").size(), 3U);
}

// Their step is not known before the program gives one.
TEST(RunLogEvents, WithoutAStepAreNotExact) {
  const TemporaryFolder folder;
  RunLog log(folder.path());
  events::emit(skip("fc2.weight", 1));
  events::emit(skip("fc2.weight", 2));
  log.add_scalar("train/loss", 1, 100);
  log.close();
  const auto lines = samples_in(folder.path());
  ASSERT_EQ(lines.size(), 2U);
  for (const auto& line : lines) {
    EXPECT_EQ(line.at("step"), 100);
    EXPECT_EQ(line.at("exact"), false);
  }
}

TEST(RunLogEvents, AreLinesOfSamples) {
  const TemporaryFolder folder;
  RunLog log(folder.path());
  log.set_step(3);
  events::emit(update(8, 8));
  events::emit(skip("fc2.weight", 1, 3));
  log.set_step(4);
  events::emit(update(8, 8));
  events::emit(update(8, 4));
  events::emit(update(2, std::numeric_limits<double>::infinity(), 1));
  log.close();
  using Json = nlohmann::json;
  const auto scale = [](int step, int id, const Json& before, const Json& after, bool found_inf) {
    return Json{{"step", step},     {"kind", "loss_scale"}, {"loss_id", id},
                {"before", before}, {"after", after},       {"found_inf", found_inf}};
  };
  EXPECT_THAT(samples_in(folder.path()),
              ElementsAre(scale(3, 0, 8.0, 8.0, false),
                          Json{{"step", 3},
                               {"kind", "skipped"},
                               {"parameter", "fc2.weight"},
                               {"non_finite", 3},
                               {"consecutive", 1},
                               {"total", 1},
                               {"loss_scale", 65536.0}},
                          scale(4, 0, 8.0, 4.0, true), scale(4, 1, nullptr, nullptr, false)));
}

// What the constructor of a scaler had was in force in no step if a checkpoint has another scale.
TEST(RunLogEvents, AScaleThatIsLoadedHasNoOtherBefore) {
  const TemporaryFolder folder;
  RunLog log(folder.path());
  events::emit(
      events::LossScaleUpdated{.loss_id = 0, .before = 65536, .after = 32768, .found_inf = false});
  log.set_step(5001);
  log.close();
  const auto line = samples_in(folder.path()).at(0);
  EXPECT_EQ(line.at("before"), 32768.0);
  EXPECT_EQ(line.at("after"), 32768.0);
}

TEST(RunLogEvents, TakeTheStepOfTheNextValueIfNoStepIsSet) {
  const TemporaryFolder folder;
  RunLog log(folder.path());
  for (const std::int64_t step : {7, 8}) {
    events::emit(update(7, static_cast<double>(step)));
    log.add_scalar("loss", 0.5, step);
  }
  events::emit(update(8, 4));
  log.close();
  EXPECT_THAT(metrics_in(folder.path()),
              ElementsAre("7,amp/loss_scale,7", "7,loss,0.5", "8,amp/loss_scale,8", "8,loss,0.5",
                          "8,amp/loss_scale,4"));
}

TEST(RunLogEvents, AreThoseOfTheThreadUntilTheEnd) {
  const TemporaryFolder folder;
  {
    RunLog log(folder / "a");
    EXPECT_TRUE(events::listening());
    log.close();
    events::emit(skip("weight", 1));  // is ignored
  }
  EXPECT_FALSE(events::listening());
  EXPECT_THAT(metrics_in(folder / "a"), IsEmpty());
}

TEST(RunLogEvents, AreRecordedOnRequestOnly) {
  const TemporaryFolder folder;
  RunLog log(folder.path(), RunLogOptions().record_events(false));
  EXPECT_FALSE(events::listening());
  const RunLog other_rank(folder.path(), RunLogOptions().rank(1).world_size(2));
  EXPECT_FALSE(events::listening());
}

}  // namespace
}  // namespace semitone::report
