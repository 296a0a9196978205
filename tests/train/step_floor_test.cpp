#include "src/train/step_floor.h"

#include "semitone/amp/opt_level.h"
#include "semitone/autocast/cast_policy.h"
#include "src/core/native_kernels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <sstream>
#include <string>
#include <string_view>

namespace semitone::train {
namespace {

using amp::OptLevel;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

WorkloadOptions tiny(std::string_view name, OptLevel level) {
  WorkloadOptions options(name);
  options.opt_level(level).batch_size(10).length(16);
  if (level != OptLevel::O0) options.dtype(torch::kBFloat16);
  options.encoder().layers(1).width(32).heads(4).ffn(64).vocabulary(100);
  options.decoder().layers(2).width(32).heads(4).ffn(64).vocabulary(100);
  return options;
}

StepFloor floor_of(const WorkloadOptions& options) {
  Workload workload(options);
  return measure_floor(workload, 2);
}

std::map<std::string, std::int64_t> calls_of(const StepFloor& floor) {
  std::map<std::string, std::int64_t> calls;
  double sum = floor.attention_seconds;
  for (const StepFloor::Product& product : floor.products) {
    EXPECT_TRUE(product.seconds > 0 && std::isfinite(product.seconds)) << product.name;
    calls[product.name] += product.calls;
    sum += product.total();
  }
  EXPECT_NEAR(floor.seconds(), sum, 1e-9);
  EXPECT_GT(floor.step_seconds, 0);
  return calls;
}

// "mm [2, 3] [3, 4]" of "mm bfloat16 [2, 3] [3, 4]".
std::map<std::string, std::int64_t> without_dtypes(
    const std::map<std::string, std::int64_t>& calls) {
  std::map<std::string, std::int64_t> result;
  for (const auto& [name, count] : calls)
    result[name.substr(0, name.find(' ')) + name.substr(name.find(" ["))] += count;
  return result;
}

TEST(StepFloor, HasTheProductsOfAStep) {
  for (const OptLevel level : {OptLevel::O0, OptLevel::O1, OptLevel::O2}) {
    SCOPED_TRACE(amp::name_of(level));
    EXPECT_THAT(
        without_dtypes(calls_of(floor_of(tiny("mnist", level)))),
        UnorderedElementsAre(
            Pair("convolution [10, 1, 28, 28] [16, 1, 5, 5] [16]", 1),
            Pair("convolution [10, 16, 14, 14] [32, 16, 5, 5] [32]", 1),
            Pair("convolution_backward [10, 16, 28, 28] [10, 1, 28, 28] [16, 1, 5, 5]", 1),
            Pair("convolution_backward [10, 32, 14, 14] [10, 16, 14, 14] [32, 16, 5, 5]", 1),
            Pair("addmm [10] [10, 1568] [1568, 10]", 1), Pair("mm [10, 10] [10, 1568]", 2)));
  }
}

TEST(StepFloor, TimesProductsInFp32IfThePolicyLeavesThem) {
  auto options = tiny("mnist", OptLevel::O1);
  options.policy(amp::CastPolicy::by_name("none", {c10::DeviceType::CPU, torch::kBFloat16}));
  for (const auto& [name, unused] : calls_of(floor_of(options)))
    EXPECT_THAT(name, HasSubstr(" float32 "));
}

TEST(StepFloor, TimesProductsInTheDtypesInWhichTheyRun) {
  using enum OperatorKind;
  const auto is_native = [](OperatorKind kind) {
    return trains_natively(c10::DeviceType::CPU, torch::kBFloat16, kind);
  };
  for (const OptLevel level : {OptLevel::O0, OptLevel::O1, OptLevel::O2}) {
    SCOPED_TRACE(amp::name_of(level));
    for (const auto& [name, unused] : calls_of(floor_of(tiny("mnist", level)))) {
      if (level == OptLevel::O0) {
        EXPECT_THAT(name, HasSubstr(" float32 "));
      } else if (is_native(convolution) && is_native(product)) {
        EXPECT_THAT(name, HasSubstr(" bfloat16 "));
      }
    }
  }
}

// Operations per second of the fastest "mm float32 [rows, depth] [depth, columns]".
double fastest_rate(const StepFloor& floor) {
  double fastest = 0;
  for (const StepFloor::Product& product : floor.products) {
    if (!product.name.starts_with("mm float32 ")) continue;
    std::string numbers = product.name.substr(product.name.find('['));
    std::ranges::replace_if(numbers, [](char c) { return c < '0' || c > '9'; }, ' ');
    std::istringstream stream(numbers);
    double rows = 0;
    double depth = 0;
    double columns = 0;
    stream >> rows >> depth >> depth >> columns;
    EXPECT_TRUE(stream) << product.name;
    fastest = std::max(fastest, 2 * rows * depth * columns / product.seconds);
  }
  EXPECT_GT(fastest, 0);
  return fastest;
}

TEST(StepFloor, CountsAttentionInBlocksByItself) {
  // 7 products with 2 operations for each of 10 x 4 x 16 x 16 x 8 elements in each of 2 layers, half
  // of them masked.
  const double flops = 2 * 7 * 2 * 10.0 * 4 * 16 * 16 * 8 / 2;
  const StepFloor decoder = floor_of(tiny("decoder", OptLevel::O0));
  EXPECT_THAT(calls_of(decoder), Not(Contains(Pair(StartsWith("bmm"), 1))));
  EXPECT_NEAR(decoder.attention_seconds, flops / fastest_rate(decoder), 1e-9);

  // A recomputation adds two products to the seven, but no gradients.
  const StepFloor recomputed = floor_of(tiny("decoder", OptLevel::O0).checkpoint_activations(true));
  EXPECT_NEAR(recomputed.attention_seconds, flops / 7 * 9 / fastest_rate(recomputed), 1e-9);

  // LibTorch makes attention with dropout of batched products.
  const StepFloor encoder = floor_of(tiny("encoder", OptLevel::O0));
  EXPECT_EQ(encoder.attention_seconds, 0);
  EXPECT_THAT(calls_of(encoder), Contains(Pair(StartsWith("bmm float32"), ::testing::Ge(1))));
}

}  // namespace
}  // namespace semitone::train
