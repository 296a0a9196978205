#include "src/launch/process.h"
#include "tests/apps/semitone_command.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <string>

namespace semitone::cli_test {
namespace {

using launch::ProcessResult;
using nlohmann::json;
using test::expect_failure;
using test::read_text;
using test::run_semitone;
using test::write_text;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// A directory with a run whose step 312 was skipped.
class ReportCommandTest : public ::testing::Test {
 protected:
  ReportCommandTest() {
    write_text(run_ / "run.json",
               R"({"outcome":"finished","config":{"opt-level":"O1","dtype":"float16"}})");
    write_text(run_ / "metrics.csv",
               "step,wall_time,name,value\n1,1.000,train/loss,2\n400,400.000,train/loss,1\n");
    write_text(run_ / "samples.jsonl",
               R"({"step":200,"wall_time":1.0,"kind":"loss_scale","before":65536,"after":131072}
{"step":312,"wall_time":2.0,"kind":"skipped","parameter":"fc.weight","non_finite":1,"loss_scale":131072}
{"step":312,"wall_time":2.0,"kind":"loss_scale","before":131072,"after":65536}
)");
  }

  std::string directory() const { return run_.path().string(); }

  test::TemporaryFolder run_;
  test::TemporaryFolder folder_;
};

TEST_F(ReportCommandTest, TellsWhyAStepWasSkipped) {
  const ProcessResult result = run_semitone({"report", directory()});
  EXPECT_TRUE(result.status.success()) << result.err;
  EXPECT_EQ(result.err, "");
  EXPECT_THAT(result.out, AllOf(HasSubstr("step 312 was skipped"), HasSubstr("'fc.weight'"),
                                HasSubstr("65536"), HasSubstr("report::Recorder")));
  EXPECT_FALSE(std::filesystem::exists(run_ / "report.html"));
}

TEST_F(ReportCommandTest, WritesJson) {
  const ProcessResult result = run_semitone({"report", directory(), "--json"});
  EXPECT_TRUE(result.status.success());
  EXPECT_EQ(json::parse(result.out).at("skipped").at(0).at("step"), 312);
  EXPECT_THAT(result.err, HasSubstr("step 312"));
  const auto path = folder_ / "report.json";
  EXPECT_TRUE(run_semitone({"report", directory(), "--json", path.string()}).status.success());
  EXPECT_EQ(json::parse(read_text(path)).at("format"), "semitone-report");
}

TEST_F(ReportCommandTest, WritesAPage) {
  EXPECT_THAT(run_semitone({"report", directory(), "--html"}).out,
              HasSubstr("The page is " + (run_ / "report.html").string()));
  EXPECT_THAT(read_text(run_ / "report.html"), StartsWith("<!doctype html>"));
  const auto path = folder_ / "page.html";
  EXPECT_TRUE(run_semitone({"report", directory(), "--html", path.string()}).status.success());
  EXPECT_EQ(read_text(path), read_text(run_ / "report.html"));
}

TEST_F(ReportCommandTest, LeavesTheFilesOfTheRecordAsTheyAre) {
  for (const std::string file : {"metrics.csv", "samples.jsonl", "run.json"}) {
    const std::string path = (run_ / file).string();
    const std::string before = read_text(path);
    for (const std::string flag : {"--html", "--json"}) {
      const ProcessResult refused = run_semitone({"report", directory(), flag, path});
      EXPECT_EQ(refused.status.code, 2);
      EXPECT_THAT(refused.err, HasSubstr("another file for " + flag));
    }
    EXPECT_EQ(read_text(path), before);
  }
  EXPECT_EQ(
      run_semitone({"report", directory(), "--json", (run_ / "run-2.json").string()}).status.code,
      2);
  EXPECT_TRUE(run_semitone({"report", directory(), "--json", (run_ / "running.json").string()})
                  .status.success());
}

TEST_F(ReportCommandTest, ComparesTwoRuns) {
  const ProcessResult result =
      run_semitone({"report", directory(), "--compare", directory(), "--json"});
  EXPECT_EQ(json::parse(result.out).at("compare").at("run").at("steps"), 400);
  EXPECT_THAT(result.err, HasSubstr("compared"));
}

TEST_F(ReportCommandTest, ErrorsNameTheDirectoryOrTheLine) {
  expect_failure(run_semitone({"report"}), 2, "[cli.report] expected a DIR");
  expect_failure(run_semitone({"report", (folder_ / "none").string()}), 1,
                 "[report.precision_report] expected the directory of a run, got '");
  expect_failure(run_semitone({"report", folder_.path().string()}), 1, "which has no run.json");
  expect_failure(run_semitone({"report", directory(), "--compare", (folder_ / "x").string()}), 1,
                 "x'");
  expect_failure(run_semitone({"report", directory(), "--html", (folder_ / "no/p.html").string()}),
                 1, "p.html");
  const std::string page = (folder_ / "p").string();
  expect_failure(
      run_semitone({"report", directory(), "--html", page, "--json", (folder_ / "./p").string()}),
      2, "expected two files for --html and --json, got '" + page + "' for both");
  write_text(run_ / "samples.jsonl", "{}\n{\n");
  expect_failure(run_semitone({"report", directory()}), 1, "in line 2 of '");
}

}  // namespace
}  // namespace semitone::cli_test
