// `semitone convert`: weights from one format to another.

#include "semitone/weights/file.h"
#include "src/launch/process.h"
#include "tests/apps/cli_fixture.h"
#include "tests/apps/semitone_command.h"
#include "tests/support/temporary_folder.h"
#include "tests/weights/fixtures.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

namespace semitone::convert_command_test {
namespace {

using launch::ProcessResult;
using test::difference;
using test::expect_failure;
using test::expected_tensors;
using test::python_file;
using test::run_semitone;
using test::TemporaryFolder;
using test::write_text;
using ::testing::AllOf;
using ::testing::HasSubstr;

class ConvertTest : public ::testing::Test {
 protected:
  std::string python(const std::string& name) {
    write_text(folder_ / name, python_file(name));
    return (folder_ / name).string();
  }
  std::string at(const std::string& name) const { return (folder_ / name).string(); }

  TemporaryFolder folder_;
};

TEST_F(ConvertTest, KeepsEveryTensorInBothDirections) {
  const ProcessResult there = run_semitone({"convert", python("dtypes.pt"), at("a.safetensors")});
  ASSERT_TRUE(there.status.success()) << there.err;
  EXPECT_THAT(there.out,
              AllOf(HasSubstr("pytorch, 16 tensors"), HasSubstr("safetensors, 16 tensors")));
  ASSERT_TRUE(run_semitone({"convert", at("a.safetensors"), at("b.pt")}).status.success());
  EXPECT_EQ(difference(weights::read(at("b.pt")).tensors, expected_tensors("dtypes")), "");
}

TEST_F(ConvertTest, ListsTheTensorsWithoutAnOutput) {
  const ProcessResult list = run_semitone({"convert", python("script.pt")});
  ASSERT_TRUE(list.status.success()) << list.err;
  EXPECT_THAT(list.out, AllOf(HasSubstr("first.weight"), HasSubstr("float32   [2, 3]"),
                              HasSubstr("torchscript, 7 tensors")));
}

TEST_F(ConvertTest, TakesAnEntryCastsAndRenames) {
  const ProcessResult done =
      run_semitone({"convert", python("checkpoint.pt"), at("a.safetensors"), "--entry",
                    "state_dict", "--strip-prefix", "first.", "--dtype", "bf16"});
  ASSERT_TRUE(done.status.success()) << done.err;
  const weights::StateDict found = weights::read(at("a.safetensors")).tensors;
  EXPECT_EQ(found["weight"].scalar_type(), torch::kBFloat16);
  EXPECT_EQ(found["norm.num_batches_tracked"].scalar_type(), torch::kLong);
}

TEST_F(ConvertTest, OnlyMetadataThatPythonDoesNotExpectIsReportedAsLost) {
  const ProcessResult lost = run_semitone({"convert", python("dtypes.safetensors"), at("a.pt")});
  EXPECT_THAT(lost.err, HasSubstr("does not keep the metadata"));
  EXPECT_THAT(lost.err, HasSubstr("step"));
  ASSERT_TRUE(
      run_semitone({"convert", python("state_dict.pt"), at("b.safetensors")}).status.success());
  const ProcessResult kept = run_semitone({"convert", at("b.safetensors"), at("c.pt")});
  ASSERT_TRUE(kept.status.success()) << kept.err;
  EXPECT_EQ(kept.err, "");
}

TEST_F(ConvertTest, ErrorsNameTheRemedyAndWriteNothing) {
  const std::string in = python("checkpoint.pt");
  expect_failure(run_semitone({"convert", in, at("a.pt")}), 1, "--entry");
  expect_failure(run_semitone({"convert", in, at("a.npz"), "--entry", "state_dict"}), 2,
                 "OUT that ends in .safetensors");
  expect_failure(run_semitone({"convert", at("missing.pt"), at("a.pt")}), 1, "No such file");
  expect_failure(run_semitone({"convert", in, at("no/folder/a.pt"), "--entry", "state_dict"}), 1,
                 "no/folder/a.pt");
  expect_failure(run_semitone({"convert", in, at("a.pt"), "--entry", "state_dict", "--strip-prefix",
                               "modul."}),
                 2, "--strip-prefix with which a name begins, got 'modul.'");
  expect_failure(run_semitone({"convert"}), 2, "IN");
  expect_failure(run_semitone({"convert", in, "--dtype", "bf16"}), 2, "OUT");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "a.pt"));
}

TEST_F(ConvertTest, TheResultDoesNotReplaceTheFileItIsReadFrom) {
  const std::string in = python("state_dict.pt");
  const std::string bytes = test::read_text(in);
  std::filesystem::create_symlink(in, folder_ / "link.pt");
  for (const std::string& out : {in, (folder_ / "." / "state_dict.pt").string(), at("link.pt")}) {
    expect_failure(run_semitone({"convert", in, out, "--dtype", "bf16"}), 2,
                   "[cli.convert] expected two files for IN and OUT, got '" + in + "' for both");
    EXPECT_TRUE(test::read_text(in) == bytes) << out;
  }
}

}  // namespace
}  // namespace semitone::convert_command_test
