// Layer norm, RMS norm and GELU against PyTorch's results.

#include "semitone/nn/fused_gelu.h"
#include "semitone/nn/fused_layer_norm.h"
#include "semitone/nn/fused_rms_norm.h"
#include "tests/nn/gradients.h"
#include "tests/support/conformance.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace semitone::nn {
namespace {

using nlohmann::json;
using test::gradients_of;
using Tensors = std::vector<at::Tensor>;

// {"shape": …, "data": …}, or null.
at::Tensor tensor_of(const json& record, c10::ScalarType dtype) {
  if (record.is_null()) return {};
  std::vector<double> values;
  for (const json& value : record.at("data")) values.push_back(test::number(value));
  return torch::tensor(values, torch::kDouble)
      .view(record.at("shape").get<std::vector<std::int64_t>>())
      .to(dtype);
}

// Of norms.json in fp64.
constexpr double kRelative = 1e-9;
constexpr double kAbsolute = 1e-11;

void expect_near(const at::Tensor& got, const at::Tensor& want, double fp32_tolerance) {
  ASSERT_EQ(got.defined(), want.defined());
  if (!got.defined()) return;
  if (got.scalar_type() == torch::kFloat) {
    EXPECT_TRUE(test::near(got, want, fp32_tolerance));
  } else {
    EXPECT_TRUE(torch::allclose(got, want, kRelative, kAbsolute)) << got << "\nwant\n" << want;
  }
}

// Runs the case in the dtype; in fp32 with that tolerance.
template <typename Function>
void run_case(const json& record, const std::vector<std::string>& arguments, c10::ScalarType dtype,
              double fp32_tolerance, const Function& function) {
  SCOPED_TRACE(c10::str(record.at("name").get<std::string>(), " ", dtype));
  Tensors inputs;
  for (const std::string& argument : arguments)
    inputs.push_back(tensor_of(record.at(argument), dtype));
  const auto got = gradients_of(function, inputs, tensor_of(record.at("grad_output"), dtype));
  expect_near(got.output, tensor_of(record.at("output"), torch::kDouble), fp32_tolerance);
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    SCOPED_TRACE(arguments[i]);
    expect_near(got.inputs[i], tensor_of(record.at("grad_" + arguments[i]), torch::kDouble),
                fp32_tolerance);
  }
}

// A row of one number has a gradient that cancels almost to 0: in fp32 it is all rounding.
std::vector<c10::ScalarType> dtypes_of(const json& record) {
  if (record.at("name") == "one-column") return {torch::kDouble};
  return {torch::kDouble, torch::kFloat};
}

// Means are rounded to fp32: what that moves, in distances from the mean.
double tolerance_of(const json& record, std::size_t dims) {
  const at::Tensor rows =
      tensor_of(record.at("input"), torch::kDouble).flatten(-static_cast<std::int64_t>(dims));
  const double terms = static_cast<double>(rows.size(-1));
  const at::Tensor means = rows.mean(-1, /*keepdim=*/true);
  const at::Tensor distances = rows.sub(means).square().mean(-1, /*keepdim=*/true).sqrt();
  const at::Tensor ratios = means.abs() / distances;
  const double largest = ratios.numel() == 0 ? 0 : ratios.max().item<double>();
  return 2 * test::pointwise_tolerance(torch::kFloat) * std::sqrt(terms) * (1 + largest);
}

std::vector<std::int64_t> shape_of(const json& record) {
  return record.at("normalized_shape").get<std::vector<std::int64_t>>();
}

TEST(NormsConformance, LayerNorm) {
  const json cases = test::conformance("norms.json").at("layer_norm");
  ASSERT_FALSE(cases.empty());
  for (const json& record : cases) {
    for (const auto dtype : dtypes_of(record)) {
      run_case(record, {"input", "weight", "bias"}, dtype,
               tolerance_of(record, shape_of(record).size()), [&](const Tensors& of) {
                 return fused_layer_norm(of[0], shape_of(record), of[1], of[2], record.at("eps"));
               });
    }
  }
}

TEST(NormsConformance, RmsNorm) {
  const json cases = test::conformance("norms.json").at("rms_norm");
  ASSERT_FALSE(cases.empty());
  for (const json& record : cases) {
    const json& eps = record.at("eps");
    for (const auto dtype : dtypes_of(record)) {
      run_case(record, {"input", "weight"}, dtype, tolerance_of(record, shape_of(record).size()),
               [&](const Tensors& of) {
                 return fused_rms_norm(of[0], shape_of(record), of[1],
                                       eps.is_null() ? std::nullopt : std::optional<double>(eps));
               });
    }
  }
}

TEST(NormsConformance, Gelu) {
  const json cases = test::conformance("norms.json").at("gelu");
  ASSERT_FALSE(cases.empty());
  for (const json& record : cases) {
    for (const auto dtype : dtypes_of(record)) {
      run_case(record, {"input"}, dtype, 2 * test::pointwise_tolerance(torch::kFloat),
               [&](const Tensors& of) {
                 return fused_gelu(of[0], record.at("approximate").get<std::string>());
               });
    }
  }
}

}  // namespace
}  // namespace semitone::nn
