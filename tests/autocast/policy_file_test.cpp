#include "semitone/autocast/cast_policy.h"
#include "semitone/core/error.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <optional>
#include <string>

namespace semitone::amp {
namespace {

const CastTarget kTarget{torch::kCPU, torch::kHalf};

class PolicyFile : public testing::Test {
 protected:
  CastPolicy written(const std::string& text) {
    std::ofstream(path_) << text;
    return CastPolicy::from_file(path_, kTarget);
  }
  std::string error_of_file(const std::string& text) {
    return test::error_of([&] { written(text); });
  }

  test::TemporaryFolder directory_;
  std::filesystem::path path_ = directory_ / "policy.json";
};

void expect_equal(const std::optional<Fp8Options>& one, const std::optional<Fp8Options>& other) {
  ASSERT_EQ(one.has_value(), other.has_value());
  if (!one.has_value()) return;
  EXPECT_EQ(one->forward(), other->forward());
  EXPECT_EQ(one->backward(), other->backward());
  EXPECT_EQ(one->amax_history(), other->amax_history());
  EXPECT_EQ(one->margin(), other->margin());
  EXPECT_EQ(one->keep_16bit_params(), other->keep_16bit_params());
}

void expect_equal(const CastPolicy& one, const CastPolicy& other) {
  expect_equal(one.fp8_options(), other.fp8_options());
  EXPECT_EQ(one.name(), other.name());
  EXPECT_EQ(one.emulation(), other.emulation());
  EXPECT_EQ(one.fast_kernels(), other.fast_kernels());
  EXPECT_EQ(one.fast_kernels_on_gpu(), other.fast_kernels_on_gpu());
  EXPECT_EQ(one.fp32_param_globs(), other.fp32_param_globs());
  ASSERT_EQ(one.rows().size(), other.rows().size());
  for (const auto& [op, row] : one.rows()) {
    const auto found = other.find(op);
    ASSERT_TRUE(found.has_value()) << op;
    EXPECT_EQ(row.action, found->action) << op;
    EXPECT_EQ(row.reason, found->reason) << op;
  }
}

TEST_F(PolicyFile, HoldsEveryEditOfEveryPreset) {
  for (const std::string& preset : CastPolicy::preset_names()) {
    SCOPED_TRACE(preset);
    auto policy = CastPolicy::by_name(preset, kTarget);
    policy.keep_fp32("softmax", "small \"probabilities\"")
        .lower("exp")
        .lower("conv2d")
        .ban("conv2d.padding")
        .leave("add_")
        .keep_fp32_params("head.*")
        .keep_fp32_params("*.bias")
        .emulation(Emulation::never)
        .fast_kernel("layer_norm", false)
        .fast_kernel("gelu", true)
        .fast_kernels_on_gpu(true)
        .fp8(Fp8Options()
                 .forward(torch::kFloat8_e5m2)
                 .amax_history(16)
                 .margin(1)
                 .keep_16bit_params({"head.*", "*.embedding"}));
    policy.save(path_);
    expect_equal(CastPolicy::from_file(path_, kTarget), policy);
    expect_equal(CastPolicy::from_file(path_, {torch::kCPU, torch::kBFloat16}),
                 policy.with_target({torch::kCPU, torch::kBFloat16}));
  }
}

TEST_F(PolicyFile, TellsAnOverloadThatWritesFromTheOperator) {
  const auto policy = CastPolicy::none(kTarget).ban("exp.out").leave("relu_");
  policy.save(path_);
  const auto read = CastPolicy::from_file(path_, kTarget);
  expect_equal(read, policy);
  EXPECT_FALSE(read.find("exp").has_value());
  EXPECT_EQ(policy.to_code(),
            "CastPolicy::none({torch::kCPU, torch::kHalf})\n    .ban(\"exp.out\")\n"
            "    .leave(\"relu_\")");
}

TEST_F(PolicyFile, OfAPresetIsThePreset) {
  const auto policy = CastPolicy::semitone(kTarget);
  policy.save(path_);
  expect_equal(CastPolicy::from_file(path_, kTarget), policy);
  EXPECT_EQ(policy.to_code(), "CastPolicy::semitone({torch::kCPU, torch::kHalf})");
}

TEST_F(PolicyFile, CanBeWrittenByHand) {
  const auto policy = written(R"({
    // A comment.
    "format": "semitone.cast-policy", "version": 1, "preset": "torch",
    "operators": {"softmax": "lower", "exp": {"action": "fp32", "reason": "large arguments"}}
  })");
  expect_equal(policy,
               CastPolicy::torch(kTarget).lower("softmax").keep_fp32("exp", "large arguments"));
}

TEST_F(PolicyFile, HasFp8AsAnObjectOrNotAtAll) {
  const std::string begin =
      R"({"format": "semitone.cast-policy", "version": 1, "preset": "semitone", "fp8": )";
  expect_equal(written(begin + "{}}"), CastPolicy::semitone(kTarget).fp8());
  expect_equal(written(begin + R"({"margin": 2}})"),
               CastPolicy::semitone(kTarget).fp8(Fp8Options().margin(2)));
  EXPECT_FALSE(CastPolicy::semitone(kTarget).fp8_options().has_value());
  EXPECT_THAT(error_of_file(begin + "true}"), testing::HasSubstr("an object of 'fp8'"));
  EXPECT_THAT(error_of_file(begin + R"({"amax_history": 2.7}})"),
              testing::HasSubstr("an integer for 'amax_history'"));
  EXPECT_THAT(error_of_file(begin + R"({"margins": 2}})"), testing::HasSubstr("'margins'"));
  EXPECT_THAT(error_of_file(begin + R"({"margin": -2}})"), testing::HasSubstr("got -2"));
  EXPECT_THAT(error_of_file(begin + R"({"margin": 1e99}})"), testing::HasSubstr("margin"));
  EXPECT_THAT(error_of_file(begin + R"({"forward": "float16"}})"),
              testing::HasSubstr("float8_e4m3fn or float8_e5m2"));
}

TEST_F(PolicyFile, OfFp8IsCodeToo) {
  EXPECT_EQ(CastPolicy::semitone(kTarget).fp8().to_code(),
            "CastPolicy::semitone({torch::kCPU, torch::kHalf})\n    .fp8()");
  EXPECT_EQ(CastPolicy::semitone(kTarget)
                .fp8(Fp8Options()
                         .backward(torch::kFloat8_e4m3fn)
                         .amax_history(16)
                         .margin(1)
                         .keep_16bit_params({"head.*", "stem.*"}))
                .to_code(),
            "CastPolicy::semitone({torch::kCPU, torch::kHalf})\n"
            "    .fp8(Fp8Options().backward(torch::kFloat8_e4m3fn).amax_history(16).margin(1)"
            ".keep_16bit_params({\"head.*\", \"stem.*\"}))");
}

TEST_F(PolicyFile, IsCodeToo) {
  const auto policy = CastPolicy::by_name("paddle-o2", {torch::kCUDA, torch::kBFloat16})
                          .keep_fp32("softmax", "why")
                          .leave("conv2d.padding")
                          .keep_fp32_params("head.*")
                          .emulation(Emulation::always)
                          .fast_kernel("gelu");
  EXPECT_EQ(policy.to_code(),
            "CastPolicy::by_name(\"paddle-o2\", {torch::kCUDA, torch::kBFloat16})\n"
            "    .leave(\"conv2d.padding\")\n"
            "    .keep_fp32(\"softmax\", \"why\")\n"
            "    .keep_fp32_params(\"head.*\")\n"
            "    .emulation(Emulation::always)\n"
            "    .fast_kernel(\"gelu\")");
}

TEST_F(PolicyFile, SaysWhatIsWrongInAFile) {
  const std::string head = R"({"format": "semitone.cast-policy", "version": 1, )";
  const struct {
    std::string text;
    std::vector<std::string> parts;
  } cases[] = {
      {"", {"missing, empty or unreadable", "policy.json"}},
      {"{", {"not JSON", "policy.json"}},
      {R"({"format": "another"})", {"semitone.cast-policy", "policy.json"}},
      {head + R"("preset": "apx"})", {"apex", "'apx'"}},
      {head + R"("preset": "apex", "operatrs": {}})", {"operators", "'operatrs'"}},
      {head + R"("preset": "apex", "operators": {"sofmax": "fp32"}})", {"did you mean 'softmax'"}},
      {head + R"("preset": "apex", "operators": {"exp": "fp23"}})", {"fp32", "'exp'", "'fp23'"}},
      {head + R"("preset": "apex", "operators": {"exp": {"acton": "fp32"}}})", {"'acton'"}},
      {head + R"("preset": "apex", "operators": {"exp": 3}})", {"an action", "'exp'", "3"}},
      {head + R"("preset": "apex", "operators": null})", {"an object of 'operators'", "null"}},
      {head + R"("preset": "apex", "fast_kernels": "gelu"})", {"a list of 'fast_kernels'", "gelu"}},
      {head + R"("preset": "apex", "operators": {"exp": )" + std::string(100000, '[') +
           std::string(100000, ']') + "}}",
       {"at most 4 deep"}},
      {head + std::string(1 << 20, ' ') + "}", {"less than 1 MiB"}},
      {head + R"("preset": 7})", {"a cast policy in", "policy.json"}},
      {head + R"("preset": "apex", "emulation": "sometimes"})", {"never", "'sometimes'"}},
      {head + R"("preset": "apex", "fast_kernels": ["conv9d"]})", {"'conv9d'"}},
      {R"({"format": "semitone.cast-policy", "version": 2, "preset": "apex"})", {"version 1", "2"}},
  };
  for (const auto& [text, parts] : cases) {
    const std::string error = error_of_file(text);
    for (const std::string& part : parts)
      EXPECT_NE(error.find(part), std::string::npos) << text << "\n" << error;
  }
  std::string many = head + R"("preset": "apex", "operators": {"x": "ban")";
  for (int i = 0; i < 60'000; ++i) many += ",\"" + std::to_string(i) + "\":\"ban\"";
  EXPECT_THAT(error_of_file(many + "}}"), testing::HasSubstr("at most 20000 keys"));
  EXPECT_THROW(CastPolicy::from_file(directory_ / "none.json", kTarget), FileError);
  EXPECT_THROW(CastPolicy::from_file(directory_.path(), kTarget), FileError);
  EXPECT_THROW(CastPolicy::semitone(kTarget).save(directory_.path() / "none" / "policy.json"),
               FileError);
}

}  // namespace
}  // namespace semitone::amp
