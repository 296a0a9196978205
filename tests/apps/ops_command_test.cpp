// `semitone ops`: the tables of the cast policies and the speed of operators; `semitone doctor`.

#include "src/launch/process.h"
#include "tests/apps/cli_fixture.h"
#include "tests/apps/semitone_command.h"
#include "tests/support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <map>
#include <string>
#include <vector>

namespace semitone::ops_command_test {
namespace {

using launch::Output;
using launch::ProcessOptions;
using launch::ProcessResult;
using nlohmann::json;
using test::CliTest;
using test::expect_failure;
using test::read_text;
using test::run_semitone;
using test::semitone_command;
using test::Words;
using test::write_text;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST_F(CliTest, OpsPrintsEveryPolicy) {
  for (const char* policy : {"semitone", "torch", "apex", "paddle", "paddle-o2"}) {
    for (const char* device : {"cpu", "cuda"}) {
      const ProcessResult ops = run_semitone({"ops", "--policy", policy, "--device", device});
      EXPECT_TRUE(ops.status.success()) << ops.err;
      EXPECT_THAT(ops.out, AllOf(HasSubstr(std::string("policy ") + policy), HasSubstr("lower"),
                                 HasSubstr("conv2d"), HasSubstr("reason")));
    }
  }
  EXPECT_THAT(run_semitone({"ops", "--policy", "none"}).out, HasSubstr("nothing is listed"));
  EXPECT_THAT(run_semitone({"ops"}).out,
              HasSubstr("Semitone's own kernels: add.Tensor, add_.Tensor, batch_norm, "));
  EXPECT_THAT(run_semitone({"ops", "--device", "cuda"}).out,
              HasSubstr("in Semitone's own kernels: view\n"));
}

TEST_F(CliTest, OpsShowsOneOperatorWithItsOverloads) {
  const ProcessResult ops = run_semitone({"ops", "--op", "prod"});
  EXPECT_THAT(ops.out, AllOf(HasSubstr("prod "), HasSubstr("prod.dim_int"), HasSubstr("fp32"),
                             Not(HasSubstr("conv3d")), Not(HasSubstr("cumprod"))));
  EXPECT_EQ(run_semitone({"ops", "--op", "aten::prod"}).out, ops.out);
  EXPECT_THAT(run_semitone({"ops", "--op", "mm."}).out, HasSubstr("lower"));
  EXPECT_THAT(run_semitone({"ops", "--op", "relu"}).out, HasSubstr("relu is not listed"));
}

TEST_F(CliTest, OpsWritesJson) {
  const ProcessResult ops = run_semitone({"ops", "--json", "--dtype", "fp16"});
  const json object = json::parse(ops.out);
  EXPECT_EQ(object.at("policy"), "semitone");
  EXPECT_EQ(object.at("device"), "cpu");
  EXPECT_EQ(object.at("dtype"), "float16");
  EXPECT_THAT(object.at("fast_kernels"), testing::Contains("layer_norm"));
  EXPECT_GT(object.at("ops").size(), 100U);
  for (const json& row : object.at("ops")) {
    EXPECT_NE(row.at("op"), "");
    EXPECT_NE(row.at("action"), "");
    EXPECT_NE(row.at("reason"), "");
  }
  const std::string file = (folder_ / "ops.json").string();
  EXPECT_TRUE(run_semitone({"ops", "--policy", "apex", "--json", file}).status.success());
  EXPECT_EQ(json::parse(read_text(file)).at("policy"), "apex");
  expect_failure(run_semitone({"ops", "--quiet"}), 2, "[cli.ops]");
}

// As on a processor without 16-bit instructions: everything is emulated, and the output says so.
TEST_F(CliTest, WhatIsEmulatedIsSaid) {
  const std::string limit = "ONEDNN_MAX_CPU_ISA";
  const Words words{"products", "convolutions", "grouped convolutions", "transposed convolutions",
                    "LSTM",     "attention"};
  for (const char* dtype : {"bf16", "fp16"}) {
    const auto ops = [&](const Words& more) {
      Words arguments{"ops", "--dtype", dtype};
      arguments.insert(arguments.end(), more.begin(), more.end());
      return launch::run(semitone_command(arguments).environment(limit, "AVX2"));
    };
    EXPECT_EQ(json::parse(ops({"--json"}).out).at("emulated").get<Words>(), words);
    EXPECT_THAT(ops({}).out, HasSubstr("float16 on this CPU: emulated\nemulated: computed in "));
  }
  const ProcessResult head = launch::run(
      semitone_command(train({"--opt-level", "O1", "--dtype", "fp16", "--limit-batches", "1"}))
          .environment(limit, "AVX2"));
  EXPECT_THAT(head.out, AllOf(ContainsRegex("bf16 emulated; fp16 emulated(; no CUDA device)?\n"),
                              HasSubstr("float16: requested; emulated here (emulated: computed")));
  EXPECT_EQ(json::parse(run_semitone({"ops", "--device", "cuda", "--json"}).out).at("emulated"),
            json::array());
}

TEST_F(CliTest, OpsMeasuresEveryKindOfOperator) {
  const ProcessResult ops = run_semitone({"ops", "--speed", "--json"});
  ASSERT_TRUE(ops.status.success()) << ops.err;
  const json object = json::parse(ops.out);
  EXPECT_THAT(object.at("device").get<std::string>(), HasSubstr("; bf16 "));
  std::map<std::string, int> rows;
  for (const json& row : object.at("speed")) {
    ++rows[row.at("kind").get<std::string>() + ", " + row.at("pass").get<std::string>()];
    EXPECT_GT(row.at("fp32_ms"), 0);
    EXPECT_GT(row.at("emulated_ms"), 0);
    EXPECT_GT(row.at("gflop"), 0);
    EXPECT_TRUE(row.at("native_ms").is_null() || row.at("native_ms") > 0) << row;
    EXPECT_TRUE(row.at("chosen") == "native" || row.at("chosen") == "emulated") << row;
    if (row.at("chosen") == "native") {
      EXPECT_FALSE(row.at("native_ms").is_null()) << row;
    }
  }
  EXPECT_EQ(rows.size(), 12U) << "6 kinds, forward and in training";
  for (const auto& [name, count] : rows) EXPECT_EQ(count, 2) << name;
  expect_failure(run_semitone({"ops", "--speed", "--op", "mm"}), 2, "--speed or --op");
  expect_failure(run_semitone({"ops", "--speed", "--device", "cuda"}), 2, "--speed for the CPU");
}

// The figures are those of a loaded machine: what is checked is that all are there.
TEST_F(CliTest, DoctorMeasuresTheMachine) {
  const ProcessResult doctor = run_semitone({"doctor", "--json"});
  ASSERT_TRUE(doctor.status.success()) << doctor.err;
  const json object = json::parse(doctor.out);
  EXPECT_GE(object.at("machine").at("cores"), 1);
  EXPECT_GE(object.at("machine").at("threads"), 1);
  for (const char* const name :
       {"product_ms", "product_ms_one_thread", "copy_gb_per_s", "copy_gb_per_s_one_thread",
        "loopback_round_trip_us", "loopback_gb_per_s"})
    EXPECT_GT(object.at("speed").at(name), 0) << name;
  EXPECT_EQ(object.at("operators").size(), 24U);
  EXPECT_EQ(object.at("findings").back().at("kind"), "recommendation");
  EXPECT_NE(object.at("findings").back().at("remedy"), "");
  expect_failure(run_semitone({"doctor", "--speed"}), 2, "[cli.doctor]");
}

TEST_F(CliTest, AFullDiskBehindStandardOutputIsAnError) {
  const ProcessResult finished =
      launch::run(ProcessOptions("sh")
                      .arguments({"-c", "\"$0\" ops > /dev/full", SEMITONE_PROGRAM})
                      .err(Output::capture));
  EXPECT_EQ(finished.status.code, 1);
  EXPECT_THAT(finished.err, HasSubstr("expected to write to standard output"));
}

TEST_F(CliTest, AFileBehindStandardOutputIsNotReplaced) {
  const std::string file = (folder_ / "log.txt").string();
  write_text(file, "precious\n");
  const ProcessResult finished = launch::run(ProcessOptions("/bin/sh").arguments(
      {"-c", "exec \"$0\" ops --op mm --json /dev/stdout >> " + file, SEMITONE_PROGRAM}));
  EXPECT_TRUE(finished.status.success());
  EXPECT_THAT(read_text(file), AllOf(StartsWith("precious\n"), HasSubstr("policy semitone for"),
                                     HasSubstr("\"op\": \"mm\"")));
}

}  // namespace
}  // namespace semitone::ops_command_test
