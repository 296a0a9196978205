#include "semitone/report/precision_report.h"

#include "semitone/core/error.h"
#include "tests/report/made_up_run.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace semitone::report::made_up {
namespace {

using semitone::test::read_text;
using semitone::test::TemporaryFolder;
using semitone::test::write_text;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

Json json_of(const MadeUpRun& run) {
  return Json::parse(PrecisionReport(run.path()).to_json());
}

std::vector<std::string> keys_of(const Json& object) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : object.items()) keys.push_back(key);
  return keys;
}

// A run in which all parts of the report have something.
void fill(MadeUpRun& run) {
  run.add_metric(10, "train/loss", "2.5").add_metric(20, "train/loss", "nan");
  Json one = sample(
      1, 1024,
      {tensor("weight", "fc.weight", "Float", -4, {8}),
       tensor("gradient", "fc.weight", "Half", -40, {1, 2, 5}),
       tensor("output", "fc", "Half", 0, {4}), tensor("output_gradient", "fc", "Half", -20, {4})});
  one["operators"] = {op("linear", "Half", 0.03), op("softmax", "Float", 0.01)};
  one["updates"] = {{{"name", "fc.weight"},
                     {"numel", 8},
                     {"ratio", 0.25},
                     {"changed", 8},
                     {"lost", {{"Half", 2}, {"BFloat16", 6}}}}};
  Json two = one;
  two["step"] = 11;
  two["memory"]["activations"] = 7000;
  two["updates"][0]["ratio"] = nullptr;
  run.add({model({parameter("fc", "Linear", {16, 8})}), one, two, scale(1, 1024, 1024),
           skipped(3, "fc.weight", 1024), scale(3, 1024, 512)});
}

TEST(PrecisionReport, HasTheKeysOfItsFormatInOrder) {
  MadeUpRun run;
  fill(run);
  const Json json = json_of(run);
  EXPECT_THAT(keys_of(json),
              ElementsAre("format", "version", "run", "verdicts", "loss", "loss_scale", "skipped",
                          "formats", "parameters", "layers", "operators", "phases", "step_seconds",
                          "memory", "compare"));
  EXPECT_EQ(json.at("format"), "semitone-report");
  EXPECT_EQ(json.at("version"), 1);
  EXPECT_TRUE(json.at("compare").is_null());
  EXPECT_THAT(keys_of(json.at("run")),
              ElementsAre("directory", "rank", "world_size", "started", "ended", "outcome",
                          "reason", "starts", "steps", "samples", "device", "processor", "threads",
                          "opt_level", "dtype", "float8", "versions", "config"));
  EXPECT_THAT(keys_of(json.at("verdicts").at(0)),
              ElementsAre("severity", "id", "title", "detail", "remedy", "figure", "unit", "where",
                          "steps"));
  EXPECT_THAT(keys_of(json.at("parameters").at(0)),
              ElementsAre("name", "layer", "layer_type", "dtype", "numel", "weight", "gradient",
                          "shares", "update_ratio", "lost", "updates"));
  EXPECT_THAT(
      keys_of(json.at("layers").at(0)),
      ElementsAre("name", "layer_type", "output", "output_gradient", "shares", "output_shares"));
  EXPECT_THAT(keys_of(json.at("operators").at(0)),
              ElementsAre("name", "pass", "dtype", "kernel", "calls", "seconds", "share", "bytes",
                          "casts", "cached_casts", "cast_bytes"));
}

TEST(PrecisionReport, DescribesTheRun) {
  MadeUpRun run;
  fill(run);
  const Json described = json_of(run).at("run");
  EXPECT_EQ(described.at("directory"), run.path().string());
  EXPECT_EQ(described.at("steps"), 20);
  EXPECT_EQ(described.at("samples"), 2);
  EXPECT_EQ(described.at("device"), "cpu");
  EXPECT_EQ(described.at("opt_level"), "O1");
  EXPECT_EQ(described.at("dtype"), "float16");
  EXPECT_EQ(described.at("config").at("lr"), "0.1");
  EXPECT_EQ(described.at("outcome"), "finished");
}

TEST(PrecisionReport, CountsStartsAndTellsHowTheLastOneEnded) {
  MadeUpRun run;
  write_text(run.path() / "run-2.json",
             R"({"start_time":"2026-11-25T01:00:00Z","end_time":null,"outcome":"running"})");
  const Json described = json_of(run).at("run");
  EXPECT_EQ(described.at("starts"), 2);
  EXPECT_EQ(described.at("started"), "2026-11-24T01:00:00Z");
  EXPECT_TRUE(described.at("ended").is_null());
  EXPECT_EQ(described.at("outcome"), "running");
}

TEST(PrecisionReport, SumsCountsOverSamples) {
  MadeUpRun run;
  fill(run);
  const Json json = json_of(run);
  const Json& parameter = json.at("parameters").at(0);
  EXPECT_EQ(parameter.at("numel"), 128);
  EXPECT_EQ(parameter.at("gradient").at("first_exponent"), -40);
  EXPECT_EQ(parameter.at("gradient").at("counts"), Json({2, 4, 10}));
  EXPECT_EQ(parameter.at("gradient").at("numel"), 16);
  EXPECT_EQ(parameter.at("gradient").at("samples"), 2);
  EXPECT_EQ(parameter.at("gradient").at("step"), 11);
  EXPECT_EQ(parameter.at("gradient").at("dtype"), "float16");
  EXPECT_EQ(parameter.at("update_ratio"), 0.25);  // not that of the other sample, which is null
  EXPECT_EQ(parameter.at("updates"), 16);
  EXPECT_EQ(parameter.at("lost"), (Json{{"float16", 0.25}, {"bfloat16", 0.75}}));
  EXPECT_EQ(json.at("operators").at(0).at("name"), "linear");
  EXPECT_DOUBLE_EQ(json.at("operators").at(0).at("seconds").get<double>(), 0.03);
  EXPECT_DOUBLE_EQ(json.at("operators").at(0).at("share").get<double>(), 0.75);
  EXPECT_EQ(json.at("operators").at(0).at("calls"), 1);  // the first sample's are left out
  EXPECT_EQ(json.at("phases"), (Json{{"forward", 0.04}, {"backward", 0.05}, {"other", 0.01}}));
  EXPECT_EQ(json.at("memory"), (Json{{"parameters", 1000.0}, {"activations", 7000.0}}));
  EXPECT_EQ(json.at("layers").at(0).at("layer_type"), "Linear");
}

TEST(PrecisionReport, AppliesTheLossScaleToGradientsOnly) {
  MadeUpRun run;
  // Scaled by 2^10, these have the exponents -30, -29 and -28: float16 rounds all to zero.
  fill(run);
  const Json json = json_of(run);
  const Json shares = json.at("parameters").at(0).at("shares");
  EXPECT_EQ(shares.at("float16"), (Json{{"zero", 1.0}, {"subnormal", 0.0}, {"overflow", 0.0}}));
  EXPECT_EQ(shares.at("bfloat16"), (Json{{"zero", 0.0}, {"subnormal", 0.0}, {"overflow", 0.0}}));
  const Json layer = json.at("layers").at(0);
  // 2^-20 times 2^10 is normal in float16, and zero in float8_e4m3fn: half of its least is 2^-10.
  EXPECT_EQ(layer.at("shares").at("float16").at("zero"), 0.0);
  EXPECT_EQ(layer.at("shares").at("float8_e4m3fn").at("zero"), 0.0);
  EXPECT_EQ(layer.at("shares").at("float8_e4m3fn").at("subnormal"), 1.0);
  EXPECT_EQ(layer.at("output_shares").at("float16").at("overflow"), 0.0);
}

TEST(PrecisionReport, HasLossesScalesAndSkippedSteps) {
  MadeUpRun run;
  fill(run);
  const Json json = json_of(run);
  EXPECT_EQ(json.at("loss"), Json::parse("[[10, 2.5], [20, null]]"));
  EXPECT_EQ(json.at("loss_scale"), Json::parse("[[1, 1024.0], [3, 512.0]]"));
  EXPECT_EQ(json.at("skipped"),
            Json::parse(
                R"([{"step": 3, "exact": true, "parameter": "fc.weight", "non_finite": 1,
               "loss_scale": 1024.0, "scale_after": 512.0}])"));
}

TEST(PrecisionReport, TakesLossScalesOfTheMetricsIfThereAreNoOthers) {
  MadeUpRun run;
  run.add_metric(1, "amp/loss_scale", "65536").add_metric(7, "amp/loss_scale", "65536");
  run.add_metric(9, "amp/loss_scale", "32768");
  EXPECT_EQ(json_of(run).at("loss_scale"), Json::parse("[[1, 65536.0], [9, 32768.0]]"));
}

TEST(PrecisionReport, TheLaterTrainingOfAStepCounts) {
  MadeUpRun run;
  run.add({sample(1, 1, {tensor("weight", "w", "Float", 0, {1})}),
           sample(5, 1, {tensor("weight", "w", "Float", 0, {7})}), skipped(5, "w", 8),
           scale(5, 8, 4), restart(4, 2000.0),
           sample(4, 1, {tensor("weight", "w", "Float", 0, {2})})});
  // Written before the restart at 2000 s, and after it.
  run.add_metric(3, "train/loss", "3").add_metric(9, "train/loss", "9");
  run.add_metrics_text("4,2000.500,train/loss,4\n5,2001.000,\"a, \"\"b\"\"\",1\n");
  const Json json = json_of(run);
  EXPECT_EQ(json.at("parameters").at(0).at("weight").at("counts"), Json({3}));
  EXPECT_THAT(json.at("skipped"), IsEmpty());
  EXPECT_THAT(json.at("loss_scale"), IsEmpty());
  EXPECT_EQ(json.at("loss"), Json::parse("[[3, 3.0], [4, 4.0]]"));
  EXPECT_EQ(json.at("run").at("steps"), 5);
}

// The clock may be set, or be another machine's: the files' order decides.
TEST(PrecisionReport, TheLaterTrainingOfAStepCountsWhateverTheClockSays) {
  MadeUpRun run;
  const std::string first = "50,5000.000,train/loss,5\n70,5000.000,train/loss,7\n";
  run.add_metrics_text(first);
  Json line = restart(51, 1000);
  line["metrics_bytes"] = ("step,wall_time,name,value\n" + first).size();
  run.add({line});
  run.add_metrics_text("51,990.000,train/loss,1\n");
  const Json json = json_of(run);
  EXPECT_EQ(json.at("loss"), Json::parse("[[50, 5.0], [51, 1.0]]"));
  EXPECT_EQ(json.at("run").at("steps"), 51);
}

// Which of several scales a gradient had is not recorded.
TEST(PrecisionReport, GradientsWithSeveralScalesHaveNoShares) {
  MadeUpRun run;
  Json other = scale(1, 8, 8);
  other["loss_id"] = 1;
  run.add({scale(1, 1024, 1024), other,
           sample(1, 1024,
                  {tensor("gradient", "w", "Float", -60, {9}),
                   tensor("weight", "w", "Float", -3, {9})})});
  const PrecisionReport report(run.path());
  const Json parameter = json_of(run).at("parameters").at(0);
  EXPECT_TRUE(parameter.at("shares").is_null());
  EXPECT_EQ(parameter.at("gradient").at("loss_scale"), 1024.0);
  EXPECT_THAT(report.to_text(), HasSubstr("gradients with several loss scales are left out"));
  EXPECT_THAT(report.to_text(), Not(HasSubstr("subnormal")));
}

TEST(PrecisionReport, FindsFloat64) {
  MadeUpRun run("unknown");
  Json one = sample(1, 1, {});
  one["operators"] = {op("linear", "Double", 0.1)};
  run.add({one});
  EXPECT_EQ(json_of(run).at("run").at("dtype"), "float64");
}

TEST(PrecisionReport, IgnoresALastLineThatHasNoEnd) {
  MadeUpRun run;
  run.add({sample(1, 1, {})}).add_text(R"({"step":2,"kind":"sam)");
  run.add_metric(1, "train/loss", "3").add_metrics_text("2,1002.0");
  EXPECT_EQ(json_of(run).at("run").at("samples"), 1);
  EXPECT_EQ(json_of(run).at("loss"), Json::parse("[[1, 3.0]]"));
}

TEST(PrecisionReport, IgnoresKindsOfLinesThatItDoesNotKnow) {
  MadeUpRun run;
  run.add({Json{{"step", 1}, {"kind", "of a later release"}, {"tensors", 5}}});
  EXPECT_EQ(json_of(run).at("run").at("samples"), 0);
}

TEST(PrecisionReport, NamesTheLineThatIsDamaged) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"{\n", "a JSON object in line 1"},
      {"[1]\n", "a JSON object"},
      {"{\"kind\":\"sample\"}\n{\"kind\":\"sample\",\"step\":\"1\"}\n",
       "an integer from 0 to 9007199254740992 for 'step' in line 2"},
      {"{\"kind\":\"sample\",\"step\":-1}\n", "for 'step'"},
      {"{\"kind\":\"sample\",\"step\":18446744073709551615}\n", "for 'step'"},
      {"{\"kind\":7,\"step\":1}\n", "a text for 'kind'"},
      {"{\"kind\":\"sample\",\"step\":1,\"tensors\":{}}\n", "a list for 'tensors'"},
      {"{\"kind\":\"sample\",\"step\":1,\"tensors\":[3]}\n", "an object"},
      {"{\"kind\":\"sample\",\"step\":1,\"tensors\":[{\"counts\":[-1]}]}\n", "for 'counts'"},
      {"{\"kind\":\"sample\",\"step\":1,\"tensors\":[{\"first_exponent\":2000}]}\n",
       "an integer from -1074 to 1023 for 'first_exponent'"},
      {"{\"kind\":\"sample\",\"step\":1,\"seconds\":-0.5}\n", "a number from 0 for 'seconds'"},
      {"{\"kind\":\"model\",\"step\":1,\"parameters\":[{\"shape\":[\"a\"]}]}\n", "for 'size'"},
      {std::string(60, '[') + "\n", "values at most 20 deep"},
  };
  for (const auto& [text, expected] : cases) {
    MadeUpRun run;
    run.add_text(text);
    const std::string message =
        semitone::test::message_of<FileError>([&] { PrecisionReport report(run.path()); });
    EXPECT_THAT(message, AllOf(HasSubstr("[report.precision_report] expected "),
                               HasSubstr(expected), HasSubstr("samples.jsonl")))
        << text;
  }
}

TEST(PrecisionReport, NamesTheLineOfTheMetricsThatIsDamaged) {
  for (const std::string text :
       {"x,1.0,loss,1\n", "1,1.0,loss,abc\n", "1,1.0\n", "1,1.0,\"loss,1\n"}) {
    MadeUpRun run;
    run.add_metrics_text(text);
    semitone::test::expect_error([&] { PrecisionReport report(run.path()); },
                                 {"line 2", "metrics.csv"});
  }
  MadeUpRun run;
  write_text(run.path() / "metrics.csv", "a,b\n");
  semitone::test::expect_error([&] { PrecisionReport report(run.path()); },
                               {"the columns step,wall_time,name,value in line 1"});
}

TEST(PrecisionReport, NamesARunFileThatIsDamaged) {
  MadeUpRun run;
  write_text(run.path() / "run.json", "{");
  semitone::test::expect_error([&] { PrecisionReport report(run.path()); },
                               {"a JSON object in '", "run.json"});
}

TEST(PrecisionReport, SaysWhatADirectoryWithoutARunHas) {
  const TemporaryFolder folder;
  semitone::test::expect_error([&] { PrecisionReport report(folder / "none"); },
                               {"the directory of a run", "none'"});
  semitone::test::expect_error([&] { PrecisionReport report(folder.path()); },
                               {"which has no run.json", "name the directory of a RunLog"});
  std::filesystem::create_directory(folder / "O2");
  write_text(folder / "O2" / "run.json", "{}");
  semitone::test::expect_error([&] { PrecisionReport report(folder.path()); },
                               {"name one of its runs: '", "O2'"});
}

TEST(PrecisionReport, AnEmptyRunHasAReport) {
  const MadeUpRun run;
  const PrecisionReport report(run.path());
  ASSERT_EQ(report.verdicts().size(), 1U);
  EXPECT_EQ(report.verdicts()[0].id, "no_samples");
  EXPECT_THAT(report.to_text(), AllOf(HasSubstr("O1, float16, finished"), HasSubstr("Recorder")));
  EXPECT_TRUE(json_of(run).at("step_seconds").is_null());
}

TEST(PrecisionReport, FindsTheDtypeOfARunWhoseSettingsDoNotTell) {
  MadeUpRun run;
  write_text(run.path() / "run.json", "{}");
  Json one = sample(1, 1, {});
  one["operators"] = {op("add", "Float", 3), op("conv2d", "BFloat16", 1)};
  run.add({one});
  EXPECT_EQ(json_of(run).at("run").at("dtype"), "bfloat16");
  EXPECT_TRUE(json_of(run).at("run").at("opt_level").is_null());
  EXPECT_EQ(json_of(run).at("run").at("float8"), false);
}

TEST(PrecisionReport, TellsThatOperatorsComputedInFloat8) {
  MadeUpRun run("bfloat16");
  Json one = sample(1, 1, {});
  one["operators"] = {op("add", "BFloat16", 3), op("conv2d", "Float8_e4m3fn", 1)};
  run.add({one});
  EXPECT_EQ(json_of(run).at("run").at("dtype"), "bfloat16");
  EXPECT_EQ(json_of(run).at("run").at("float8"), true);
  EXPECT_THAT(PrecisionReport(run.path()).to_text(), HasSubstr("O1, bfloat16 and float8, "));
}

TEST(PrecisionReport, ComparesTwoRuns) {
  MadeUpRun first;
  fill(first);
  MadeUpRun second("bfloat16");
  second.add_metric(50, "train/loss", "0.125");
  PrecisionReport report(first.path());
  report.compare_with(PrecisionReport(second.path()));
  const Json other = Json::parse(report.to_json()).at("compare");
  EXPECT_EQ(other.at("run").at("dtype"), "bfloat16");
  EXPECT_FALSE(other.contains("compare"));
  EXPECT_THAT(report.to_text(), AllOf(HasSubstr("compared"), HasSubstr("0.125")));
  EXPECT_THAT(PrecisionReport(first.path()).to_text(), Not(HasSubstr("compared")));
}

TEST(PrecisionReport, TextTellsWhyAStepWasSkipped) {
  MadeUpRun run;
  fill(run);
  EXPECT_THAT(
      PrecisionReport(run.path()).to_text(),
      HasSubstr(
          "step 3 was skipped: the gradient of 'fc.weight' was not finite at loss scale 1024; "
          "the scale fell\n  to 512"));
}

TEST(PrecisionReport, PageHoldsTheJsonWhateverItsNamesAre) {
  MadeUpRun run;
  run.add({sample(1, 1, {tensor("weight", "</script><!--", "Float", 0, {1})})});
  const PrecisionReport report(run.path());
  const std::string page = report.to_html();
  const std::string begin = R"(<script type="application/json" id="report">)";
  const auto start = page.find(begin) + begin.size();
  const auto end = page.find("</script>", start);
  const Json json = Json::parse(page.substr(start, end - start));
  EXPECT_EQ(json, Json::parse(report.to_json()));
  EXPECT_EQ(json.at("parameters").at(0).at("name"), "</script><!--");
  for (const char* const mark : {"<!--CSS-->", "<!--DATA-->", "<!--JS-->"})
    EXPECT_THAT(page, Not(HasSubstr(mark)));
  EXPECT_THAT(page, AllOf(HasSubstr("<style>"), EndsWith("</html>\n")));
  report.write_html(run.path() / "report.html");
  EXPECT_EQ(read_text(run.path() / "report.html"), page);
}

// Pages for page_test.py, into the directory SEMITONE_PAGE_DIR.
TEST(Page, WritesPages) {
  const TemporaryFolder folder;
  const char* const wanted = std::getenv("SEMITONE_PAGE_DIR");
  const std::filesystem::path directory = wanted == nullptr ? folder.path() : wanted;
  MadeUpRun run;
  fill(run);
  PrecisionReport report(run.path());
  report.write_html(directory / "run.html");
  report.compare_with(PrecisionReport(MadeUpRun().path()));
  report.write_html(directory / "compared.html");
  const MadeUpRun empty;
  PrecisionReport(empty.path()).write_html(directory / "empty.html");
  EXPECT_GT(std::filesystem::file_size(directory / "compared.html"),
            std::filesystem::file_size(directory / "empty.html"));
}

}  // namespace
}  // namespace semitone::report::made_up
