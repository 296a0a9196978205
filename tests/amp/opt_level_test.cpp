#include "semitone/amp/opt_level.h"

#include "semitone/core/device.h"
#include "semitone/core/error.h"
#include "semitone/scaling/detail/loss_scale_state.h"
#include "tests/support/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace semitone::amp::opt_level_test {
namespace {

using c10::ScalarType;
using test::message_of;
using testing::AllOf;
using testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();

Properties resolved(const Options& options, c10::DeviceType device = c10::DeviceType::CPU) {
  return Properties::resolve(options, device);
}

std::string error_of(const std::function<void()>& run) {
  return message_of<Error>(run);
}

// A text would be true, also "False".
template <typename Value>
concept IsSwitch = requires(Options options, const Value& value) {
  options.enabled(value);
} || requires(Options options, const Value& value) { options.patch_torch_functions(value); };
static_assert(IsSwitch<bool> && !IsSwitch<char[6]> && !IsSwitch<const char*>);

TEST(OptLevel, NamesParseBack) {
  for (const OptLevel level : {OptLevel::O0, OptLevel::O1, OptLevel::O2, OptLevel::O3}) {
    EXPECT_EQ(parse_opt_level(name_of(level)), level);
  }
  EXPECT_EQ(name_of(OptLevel::O2), "O2");
}

TEST(OptLevel, OtherNamesAreErrorsAndAZeroIsPointedOut) {
  EXPECT_EQ(error_of([] { parse_opt_level("02"); }),
            "[amp.opt_level] expected O0, O1, O2 or O3, got '02' — the first character is the "
            "letter O, not the digit zero");
  EXPECT_EQ(error_of([] { parse_opt_level("O4"); }),
            "[amp.opt_level] expected O0, O1, O2 or O3, got 'O4'");
  for (const char* bad : {"", "o1", "O", "O1 ", "1", "O10", "00x"}) {
    EXPECT_THROW(parse_opt_level(bad), Error) << bad;
  }
  EXPECT_THAT(error_of([] { Options("00"); }), HasSubstr("letter O"));
  EXPECT_EQ(Options(std::string("O3")).opt_level(), OptLevel::O3);
  EXPECT_EQ(Options().opt_level(), OptLevel::O1);
}

TEST(LossScale, IsANumberOrDynamic) {
  EXPECT_TRUE(detail::LossScale("dynamic").is_dynamic());
  EXPECT_EQ(detail::LossScale("dynamic").to_string(), "dynamic");
  EXPECT_EQ(detail::LossScale(128).value(), 128);
  EXPECT_FALSE(detail::LossScale(128).is_dynamic());
  EXPECT_EQ(detail::LossScale("128.0").value(), 128);
  EXPECT_EQ(detail::LossScale(std::string("1e3")).value(), 1000);
  EXPECT_EQ(detail::LossScale(0.5).to_string(), "0.5");
}

TEST(LossScale, OtherTextAndNumbersAreErrors) {
  for (const char* bad :
       {"", "Dynamic", "128x", "x", "0", "-1", "inf", "nan", "1 2", "1e39", "1e-320"}) {
    EXPECT_THAT(error_of([&] { detail::LossScale{bad}; }),
                HasSubstr("expected a loss scale above 0 that float32 holds, or \"dynamic\""))
        << bad;
  }
  for (const double bad : {0.0, -1.0, 1e39, 1e-39, kInf, std::nan("")}) {
    EXPECT_THROW(detail::LossScale{bad}, Error) << bad;
  }
}

TEST(Flag, TakesWhatStoodOnACommandLine) {
  EXPECT_TRUE(detail::Flag("True").value());
  EXPECT_TRUE(detail::Flag("true").value());
  EXPECT_FALSE(detail::Flag(std::string("False")).value());
  EXPECT_FALSE(detail::Flag("false").value());
  EXPECT_TRUE(detail::Flag(true).value());
  for (const char* bad : {"", "yes", "1", "TRUE", "None"}) {
    EXPECT_THAT(error_of([&] { detail::Flag{bad}; }), HasSubstr("expected true or false")) << bad;
  }
  EXPECT_FALSE(resolved(Options("O2").keep_batchnorm_fp32("False")).keep_batchnorm_fp32);
  EXPECT_TRUE(resolved(Options("O3").master_weights(std::string("True"))).master_weights);
}

struct DefaultsCase {
  OptLevel level;
  ScalarType dtype;
  std::optional<ScalarType> cast_model_type;
  bool patch_torch_functions;
  bool keep_batchnorm_fp32;
  bool master_weights;
  const char* loss_scale;
};

TEST(Properties, DefaultsOfEachLevelAndDtype) {
  constexpr auto kHalf = ScalarType::Half;
  constexpr auto kBf16 = ScalarType::BFloat16;
  constexpr auto kFloat = ScalarType::Float;
  using enum OptLevel;
  const std::vector<DefaultsCase> cases{
      {O0, kHalf, kFloat, false, false, false, "1"},
      {O0, kBf16, kFloat, false, false, false, "1"},
      {O1, kHalf, std::nullopt, true, false, false, "dynamic"},
      {O1, kBf16, std::nullopt, true, false, false, "1"},
      {O2, kHalf, kHalf, false, true, true, "dynamic"},
      {O2, kBf16, kBf16, false, true, true, "1"},
      {O3, kHalf, kHalf, false, false, false, "1"},
      {O3, kBf16, kBf16, false, false, false, "1"},
  };
  for (const DefaultsCase& one : cases) {
    for (const Properties& properties : {Properties::defaults(one.level, one.dtype),
                                         resolved(Options(one.level).dtype(one.dtype))}) {
      SCOPED_TRACE(properties.to_string());
      EXPECT_TRUE(properties.enabled);
      EXPECT_EQ(properties.opt_level, one.level);
      EXPECT_EQ(properties.dtype, one.dtype);
      EXPECT_EQ(properties.cast_model_type, one.cast_model_type);
      EXPECT_EQ(properties.patch_torch_functions, one.patch_torch_functions);
      EXPECT_EQ(properties.keep_batchnorm_fp32, one.keep_batchnorm_fp32);
      EXPECT_EQ(properties.master_weights, one.master_weights);
      EXPECT_EQ(properties.loss_scale.to_string(), one.loss_scale);
      EXPECT_EQ(properties.cast_model_outputs, kFloat);
      EXPECT_EQ(properties.num_losses, 1);
      EXPECT_EQ(properties.verbosity, 1);
    }
  }
}

TEST(Properties, TheDtypeFollowsTheDevice) {
  EXPECT_EQ(resolved("O2", c10::DeviceType::CPU).dtype, ScalarType::BFloat16);
  EXPECT_EQ(resolved("O2", c10::DeviceType::CUDA).dtype, ScalarType::Half);
  const auto properties = resolved(Options("O2").device(c10::DeviceType::CUDA));
  EXPECT_EQ(properties.device, c10::DeviceType::CUDA);
  EXPECT_EQ(properties.cast_model_type, ScalarType::Half);
}

TEST(Properties, EachOptionOverridesItsDefault) {
  const auto properties = resolved(Options(OptLevel::O2)
                                       .cast_model_type(ScalarType::Half)
                                       .keep_batchnorm_fp32(false)
                                       .master_weights(false)
                                       .loss_scale(128.0)
                                       .cast_model_outputs(ScalarType::Half)
                                       .num_losses(3)
                                       .verbosity(0)
                                       .enabled(false));
  EXPECT_FALSE(properties.enabled);
  EXPECT_EQ(properties.dtype, ScalarType::Half);
  EXPECT_EQ(properties.cast_model_type, ScalarType::Half);
  EXPECT_FALSE(properties.keep_batchnorm_fp32);
  EXPECT_FALSE(properties.master_weights);
  EXPECT_EQ(properties.loss_scale.value(), 128);
  EXPECT_EQ(properties.cast_model_outputs, ScalarType::Half);
  EXPECT_EQ(properties.num_losses, 3);
  EXPECT_EQ(properties.verbosity, 0);
}

TEST(Properties, CastModelTypeCanBeNoneOrFp32) {
  EXPECT_EQ(resolved(Options("O2").cast_model_type(std::nullopt)).cast_model_type, std::nullopt);
  EXPECT_EQ(resolved(Options("O3").cast_model_type(ScalarType::Float)).cast_model_type,
            ScalarType::Float);
  EXPECT_EQ(resolved(Options("O1").cast_model_type(ScalarType::Float)).cast_model_type,
            ScalarType::Float);
  EXPECT_EQ(resolved(Options("O1").cast_model_type(std::nullopt)).cast_model_type, std::nullopt);
  // A 16-bit one is the dtype too.
  EXPECT_EQ(resolved(Options("O0").cast_model_type(ScalarType::Half)).dtype, ScalarType::Half);
}

TEST(Properties, O1CanBeWithoutItsRegion) {
  EXPECT_FALSE(resolved(Options("O1").patch_torch_functions(false)).patch_torch_functions);
  EXPECT_TRUE(resolved(Options("O1").patch_torch_functions(true)).patch_torch_functions);
  EXPECT_NO_THROW(resolved(Options("O2").patch_torch_functions(false)));
}

TEST(Properties, ContradictionsAreErrorsThatNameBothSides) {
  EXPECT_THAT(error_of([] { resolved(Options("O1").cast_model_type(ScalarType::Half)); }),
              AllOf(HasSubstr("[amp.initialize]"), HasSubstr("no 16-bit cast_model_type at O1"),
                    HasSubstr("O1 with cast_model_type float16")));
  EXPECT_THAT(error_of([] { resolved(Options("O1").keep_batchnorm_fp32(true)); }),
              HasSubstr("expected no keep_batchnorm_fp32 at O1, got O1 with keep_batchnorm_fp32"));
  EXPECT_THROW(resolved(Options("O1").keep_batchnorm_fp32(false)), Error);
  EXPECT_THAT(error_of([] { resolved(Options("O1").master_weights(true)); }),
              HasSubstr("expected no master_weights at O1"));
  EXPECT_THROW(resolved(Options("O1").master_weights(false)), Error);
  for (const char* level : {"O0", "O2", "O3"}) {
    EXPECT_THAT(error_of([&] { resolved(Options(level).patch_torch_functions(true)); }),
                HasSubstr("expected patch_torch_functions at O1 only"))
        << level;
  }
  EXPECT_THAT(
      error_of([] {
        resolved(Options("O2").dtype(ScalarType::Half).cast_model_type(ScalarType::BFloat16));
      }),
      AllOf(HasSubstr("expected one 16-bit dtype"), HasSubstr("float16"), HasSubstr("bfloat16")));
  EXPECT_NO_THROW(
      resolved(Options("O2").dtype(ScalarType::Half).cast_model_type(ScalarType::Half)));
}

TEST(Options, SettersRefuseWhatMakesNoSense) {
  EXPECT_THAT(error_of([] { Options().dtype(ScalarType::Float); }),
              HasSubstr("expected dtype float16 or bfloat16, got float32"));
  EXPECT_THAT(
      error_of([] { Options().cast_model_type(ScalarType::Double); }),
      HasSubstr("expected cast_model_type float32, float16, bfloat16 or none, got float64"));
  EXPECT_THAT(error_of([] { Options().cast_model_outputs(ScalarType::Long); }),
              HasSubstr("expected a floating cast_model_outputs, got int64"));
  EXPECT_THAT(error_of([] { Options().num_losses(0); }),
              HasSubstr("expected num_losses of at least 1, got 0"));
  EXPECT_THAT(error_of([] { Options().verbosity(3); }),
              HasSubstr("expected verbosity 0, 1 or 2, got 3"));
  EXPECT_THROW(Options().verbosity(-1), Error);
  EXPECT_THAT(error_of([] { Options().min_loss_scale(-2); }), HasSubstr("min_scale"));
  EXPECT_THAT(error_of([] { Options().max_loss_scale(0); }), HasSubstr("max_scale"));
  EXPECT_THROW(Options().loss_scale("fast"), Error);
}

TEST(Properties, ADynamicScaleHasApexsCeilingAndOurFloor) {
  const auto rule = resolved(Options("O2").dtype(ScalarType::Half)).loss_scale_options;
  EXPECT_TRUE(rule.dynamic());
  EXPECT_EQ(rule.init_scale(), 65536);
  EXPECT_EQ(rule.min_scale(), 0x1p-24);
  EXPECT_EQ(rule.max_scale(), 0x1p24);
  EXPECT_EQ(rule.growth_interval(), 2000);
}

TEST(Properties, BoundsOfADynamicScale) {
  const auto rule =
      resolved(Options("O0").loss_scale("dynamic").min_loss_scale(4).max_loss_scale(64))
          .loss_scale_options;
  EXPECT_EQ(rule.min_scale(), 4);
  EXPECT_EQ(rule.max_scale(), 64);
  EXPECT_EQ(detail::initial_loss_scale(rule).scale, 64);
  EXPECT_EQ(resolved(Options("O0").min_loss_scale(0)).loss_scale_options.min_scale(), 0);
  EXPECT_THAT(error_of([] {
                resolved(Options("O0").loss_scale("dynamic").min_loss_scale(8).max_loss_scale(4));
              }),
              HasSubstr("min_scale of at most max_scale, got 8 and 4"));
}

TEST(Properties, AScaleThatWasGivenHoldsWhateverTheBounds) {
  for (const double scale : {1.0, 128.0, 0x1p30, 0x1p-30}) {
    const auto rule = resolved(Options("O2").loss_scale(scale).min_loss_scale(2).max_loss_scale(64))
                          .loss_scale_options;
    EXPECT_FALSE(rule.dynamic());
    EXPECT_EQ(detail::initial_loss_scale(rule).scale, scale);
  }
  EXPECT_THROW(resolved(Options("O2").loss_scale(1e39)), Error);  // inf in fp32
}

TEST(Properties, TheRestOfTheRuleComesFromItsOptions) {
  const auto given = LossScaleOptions::paddle().init_scale(1024).growth_interval(7).hysteresis(2);
  const auto rule =
      resolved(Options("O2").dtype(ScalarType::Half).loss_scale_options(given).max_loss_scale(4096))
          .loss_scale_options;
  EXPECT_EQ(rule.init_scale(), 1024);
  EXPECT_EQ(rule.growth_interval(), 7);
  EXPECT_EQ(rule.hysteresis(), 2);
  EXPECT_EQ(rule.min_scale(), 1);
  EXPECT_EQ(rule.max_scale(), 4096);
  // They do not turn scaling on.
  const auto bf16 = resolved(Options("O2").dtype(ScalarType::BFloat16).loss_scale_options(given));
  EXPECT_FALSE(bf16.loss_scale_options.dynamic());
  EXPECT_EQ(bf16.loss_scale.value(), 1);
}

TEST(Properties, AFixedRuleGivesTheNumber) {
  for (const auto dtype : {ScalarType::Half, ScalarType::BFloat16}) {
    const auto properties =
        resolved(Options("O2").dtype(dtype).loss_scale_options(LossScaleOptions::fixed(32)));
    EXPECT_EQ(properties.loss_scale.to_string(), "32");
    EXPECT_EQ(detail::initial_loss_scale(properties.loss_scale_options).scale, 32);
    EXPECT_FALSE(properties.loss_scale_options.dynamic());
  }
  EXPECT_EQ(resolved(Options("O2").loss_scale(8).loss_scale_options(LossScaleOptions::fixed(32)))
                .loss_scale.value(),
            8);
  EXPECT_THAT(error_of([] {
                resolved(Options("O2").loss_scale("dynamic").loss_scale_options(
                    LossScaleOptions::fixed(32)));
              }),
              HasSubstr("one loss scale"));
}

TEST(Properties, KeepWhatIsSaidOfCudnn) {
  const auto properties = resolved(
      Options("O1").cudnn_benchmark(true).cudnn_benchmark_limit(4).cudnn_workspace_limit(64));
  EXPECT_EQ(properties.cudnn.benchmark, true);
  EXPECT_EQ(properties.cudnn.benchmark_limit, 4);
  EXPECT_EQ(properties.cudnn.workspace_limit, 64);
  EXPECT_THAT(properties.to_string(),
              AllOf(HasSubstr("cudnn_benchmark       yes"), HasSubstr("cudnn_benchmark_limit 4"),
                    HasSubstr("cudnn_workspace_limit 64 MiB")));
  EXPECT_THAT(resolved("O1").to_string(), testing::Not(HasSubstr("cudnn")));
  EXPECT_THAT(error_of([] { Options().cudnn_benchmark_limit(-1); }), HasSubstr("0 or more"));
  EXPECT_THAT(error_of([] { Options().cudnn_workspace_limit(0); }), HasSubstr("1 MiB or more"));
}

TEST(Properties, SayWhatIsEmulated) {
  const auto said = [](const char* level, ScalarType dtype, c10::DeviceType device) {
    const auto text = resolved(Options(level).dtype(dtype), device).to_string();
    return text.find("\n  emulation             ") != std::string::npos;
  };
  for (const auto dtype : {ScalarType::Half, ScalarType::BFloat16}) {
    const bool emulated = describe_16bit(c10::DeviceType::CPU, dtype) != "native";
    for (const char* level : {"O1", "O2", "O3"})
      EXPECT_EQ(said(level, dtype, c10::DeviceType::CPU), emulated) << level;
    EXPECT_FALSE(said("O0", dtype, c10::DeviceType::CPU));
    EXPECT_FALSE(said("O1", dtype, c10::DeviceType::CUDA));
  }
}

TEST(Properties, ToStringShowsEveryProperty) {
  const auto text = resolved(Options("O2").dtype(ScalarType::Half).loss_scale(128)).to_string();
  EXPECT_THAT(
      text,
      AllOf(HasSubstr("opt level O2 with float16 on cpu"),
            HasSubstr("cast_model_type       float16"), HasSubstr("patch_torch_functions no"),
            HasSubstr("keep_batchnorm_fp32   yes"), HasSubstr("master_weights        yes"),
            HasSubstr("loss_scale            128"), HasSubstr("cast_model_outputs    float32")));
  EXPECT_THAT(resolved(Options("O1").policy(CastPolicy::apex())).to_string(),
              HasSubstr("policy 'apex'"));
  EXPECT_THAT(resolved("O1").to_string(), HasSubstr("cast_model_type       none"));
  EXPECT_EQ(resolved(Options("O2").enabled(false)).to_string(), "mixed precision: disabled");
}

}  // namespace
}  // namespace semitone::amp::opt_level_test
