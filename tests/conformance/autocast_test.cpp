// Compares every call of autocast_cpu.json with LibTorch: output dtypes, whether it raises, and a
// checksum, with casts off, in a bf16 and in an fp16 region.

#include "semitone/autocast/autocast.h"

#include "semitone/core/dtype.h"
#include "src/autocast/op_names.h"
#include "src/core/libtorch_release.h"
#include "tests/support/conformance.h"

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace semitone::test {
namespace {

using nlohmann::json;

struct Outcome {
  bool raised = false;
  std::string message;
  std::vector<std::pair<std::string, double>> outputs;  // dtype, sum of absolute values
};

void collect(const c10::IValue& value, Outcome& outcome) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return;
    const at::Tensor wide = tensor.to(tensor.is_complex() ? torch::kComplexDouble : torch::kDouble);
    outcome.outputs.emplace_back(dtype_name(tensor.scalar_type()),
                                 wide.abs().sum().to(torch::kDouble).item<double>());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) collect(tensor, outcome);
  } else if (value.isBool()) {
    outcome.outputs.emplace_back("bool", value.toBool() ? 1 : 0);
  }
}

Outcome call(const c10::OperatorHandle& op, const json& arguments) {
  Outcome outcome;
  torch::jit::Stack stack;
  const auto& schema = op.schema().arguments();
  for (std::size_t i = 0; i < schema.size(); ++i) {
    stack.push_back(make_argument(arguments.at(i), schema[i].type()));
  }
  try {
    op.callBoxed(stack);
    for (const c10::IValue& value : stack) collect(value, outcome);
  } catch (const std::exception& error) {
    outcome.raised = true;
    outcome.message = std::string(error.what()).substr(0, 160);
  }
  return outcome;
}

bool has_16bit(const json& value) {
  const std::string text = value.dump();
  return text.find("float16") != std::string::npos;  // bfloat16 too
}

// The README's tolerance: 1e-2 where any 16-bit dtype is involved, 2e-4 else; relative, of a sum of
// magnitudes.
void compare(const json& expected, const Outcome& got, bool any_16bit) {
  if (expected.is_string()) {
    EXPECT_TRUE(got.raised) << "should raise: " << expected;
    return;
  }
  ASSERT_FALSE(got.raised) << got.message;
  ASSERT_EQ(got.outputs.size(), expected.size());
  const double tolerance = any_16bit ? 1e-2 : 2e-4;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(got.outputs[i].first, expected[i][0].get<std::string>()) << "output " << i;
    if (expected[i][1].is_null()) continue;
    const double want = number(expected[i][1]);
    const double difference = std::abs(got.outputs[i].second - want);
    EXPECT_TRUE(difference <= tolerance * std::abs(want))
        << "output " << i << ": " << got.outputs[i].second << " for " << want;
  }
}

// The results of this LibTorch: those of the newer version if they differ and it is in use.
std::optional<json> expectation(const json& one_case, const char* region) {
#if SEMITONE_LIBTORCH_SINCE(2, 15)
  if (one_case.contains("newer")) {
    if (one_case["newer"].is_null()) return std::nullopt;
    if (one_case["newer"].contains(region)) return one_case["newer"][region];
  }
#endif
  if (one_case.contains("cpu_dependent")) {
    for (const json& dependent : one_case["cpu_dependent"]) {
      if (dependent == region) return std::nullopt;
    }
  }
  return one_case.at(region);
}

template <typename Enter>
void run_all(const char* region, Enter&& enter) {
  const json data = conformance("autocast_cpu.json");
  const torch::NoGradGuard no_grad;
  std::size_t compared = 0;
  for (const json& one_case : data.at("cases")) {
    const auto expected = expectation(one_case, region);
    if (!expected.has_value()) continue;
    SCOPED_TRACE(one_case.at("id").get<std::string>() + " in " + region);
    const auto op = amp::find_operator(one_case.at("op").get<std::string>());
    ASSERT_TRUE(op.has_value());
    const bool any_16bit = has_16bit(one_case.at("args")) || std::string(region) != "off";
    compare(*expected, enter([&] { return call(*op, one_case.at("args")); }), any_16bit);
    ++compared;
  }
  EXPECT_GT(compared, 0U);
}

TEST(AutocastConformance, Off) {
  run_all("off", [](const auto& run) { return run(); });
}

class AutocastRegionConformance
    : public testing::TestWithParam<std::tuple<c10::ScalarType, amp::Emulation>> {};

TEST_P(AutocastRegionConformance, PresetTorchDoesWhatLibTorchDoes) {
  const auto [dtype, emulation] = GetParam();
  const auto policy = amp::CastPolicy::torch({torch::kCPU, dtype}).emulation(emulation);
  run_all(dtype == torch::kHalf ? "fp16" : "bf16", [&](const auto& run) {
    const amp::Autocast region(policy);
    return run();
  });
}

std::vector<Outcome> run_with_libtorchs_autocast(c10::ScalarType dtype) {
  const json data = conformance("autocast_cpu.json");
  const torch::NoGradGuard no_grad;
  std::vector<Outcome> outcomes;
  at::autocast::set_autocast_dtype(torch::kCPU, dtype);
  at::autocast::set_autocast_enabled(torch::kCPU, true);
  for (const json& one_case : data.at("cases")) {
    const auto op = amp::find_operator(one_case.at("op").get<std::string>());
    outcomes.push_back(op.has_value() ? call(*op, one_case.at("args")) : Outcome{});
  }
  at::autocast::set_autocast_enabled(torch::kCPU, false);
  at::autocast::clear_cache();
  return outcomes;
}

// Programs that use LibTorch's own autocast as well must not notice that Semitone's kernels
// replaced its kernels.
TEST_P(AutocastRegionConformance, LibTorchsOwnRegionsStayAsTheyWere) {
  const auto dtype = std::get<0>(GetParam());
  const auto before = run_with_libtorchs_autocast(dtype);
  for (const char* preset : {"apex", "paddle", "semitone", "none"}) {
    const auto policy =
        amp::CastPolicy::by_name(preset, torch::kCPU).emulation(std::get<1>(GetParam()));
    const amp::Autocast installs_its_kernels(policy);
  }
  const auto after = run_with_libtorchs_autocast(dtype);
  ASSERT_EQ(before.size(), after.size());
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(before[i].raised, after[i].raised) << "case " << i << ": " << after[i].message;
    ASSERT_EQ(before[i].outputs.size(), after[i].outputs.size()) << "case " << i;
    for (std::size_t k = 0; k < before[i].outputs.size(); ++k) {
      EXPECT_EQ(before[i].outputs[k].first, after[i].outputs[k].first) << "case " << i;
      // Not bit for bit: a few factorisations differ from call to call with the alignment of their
      // memory.
      const double want = before[i].outputs[k].second;
      const double got = after[i].outputs[k].second;
      EXPECT_TRUE(std::abs(got - want) <= 2e-4 * std::abs(want) ||
                  (std::isnan(got) && std::isnan(want)) || got == want)
          << "case " << i << ": " << got << " for " << want;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, AutocastRegionConformance,
                         testing::Combine(testing::Values(torch::kBFloat16, torch::kHalf),
                                          testing::Values(amp::Emulation::automatic,
                                                          amp::Emulation::always)),
                         [](const auto& tested) {
                           return dtype_name(std::get<0>(tested.param)) +
                                  (std::get<1>(tested.param) == amp::Emulation::always ? "_emulated"
                                                                                       : "");
                         });

}  // namespace
}  // namespace semitone::test
