#include "tests/report/made_up_verdicts.h"
#include "tests/support/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace semitone::report::made_up {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(ReportText, HasNoControlCharactersOfNames) {
  MadeUpRun run;
  semitone::test::write_text(
      run.path() / "run.json",
      R"({"outcome":"failed","reason":"first\u001b[2J\nsecond","config":{"dtype":"float16"}})");
  run.add({sample(1, 1, {tensor("gradient", "a\x1b[31m\n\x7f", "Half", -40, {9})})});
  Json one = sample(2, 1, {});
  one["operators"] = {op("op\r\t", "Half", 1)};
  run.add({one, skipped(2, "a\x1b[31m", 1)});
  const std::string text = PrecisionReport(run.path()).to_text();
  EXPECT_TRUE(std::all_of(text.begin(), text.end(), [](char letter) {
    return letter == '\n' || (static_cast<unsigned char>(letter) >= 0x20 && letter != 0x7f);
  })) << text;
  EXPECT_THAT(text, AllOf(HasSubstr("(first?[2J)"), Not(HasSubstr("second")),
                          HasSubstr("'a?[31m?"
                                    "?'")));
}

TEST(ReportText, ShortensNamesBetweenCharacters) {
  for (int before = 0; before < 4; ++before) {
    MadeUpRun run;
    std::string name(static_cast<std::size_t>(before), 'x');
    for (int i = 0; i < 20; ++i) name += "é∑";
    run.add({sample(1, 1, {tensor("gradient", name, "Float", -8, {9})})});
    const std::string text = PrecisionReport(run.path()).to_text();
    // Json refuses text that is not UTF-8.
    EXPECT_NO_THROW(Json(text).dump()) << before;
    EXPECT_THAT(text, HasSubstr(".."));
  }
}

TEST(ReportText, StepsOfMetricsHaveLimits) {
  for (const char* const step : {"-1", "9007199254740993"}) {
    MadeUpRun run;
    run.add_metrics_text(std::string(step) + ",1.0,loss,1\n");
    semitone::test::expect_error([&] { PrecisionReport report(run.path()); },
                                 {"an integer from 0 to 9007199254740992 for 'step' in line 2"});
  }
}

}  // namespace
}  // namespace semitone::report::made_up
