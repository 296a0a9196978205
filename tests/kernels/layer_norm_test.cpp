// Layer norm and RMS norm against their references.

#include "src/kernels/layer_norm.h"

#include "semitone/core/dtype.h"
#include "src/core/dtype_limits.h"
#include "src/kernels/parallel_rows.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace semitone::kernels::layer_norm_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_close;

constexpr c10::ScalarType kDtypes[] = {torch::kFloat, torch::kHalf, torch::kBFloat16,
                                       torch::kDouble};

// The dtype of the kernel's computation, whose roundings count.
c10::ScalarType computed(c10::ScalarType dtype) {
  return dtype == torch::kDouble ? dtype : torch::kFloat;
}

// Sizes around those of a vector, of what is added up side by side, and of a block in fp32; rows
// around those of a tile and of a part.
std::vector<std::pair<std::int64_t, std::int64_t>> shapes() {
  std::vector<std::pair<std::int64_t, std::int64_t>> all;
  for (std::int64_t columns = 1; columns <= 70; ++columns) {
    // Vectors have 1 to 16 lanes; of the longer rows, those around a multiple of 16.
    if (columns <= 20 || (columns + 1) % 16 <= 2) all.emplace_back(1 + columns % 6, columns);
  }
  for (const std::int64_t columns : {127, 128, 129, 768}) all.emplace_back(7, columns);
  for (const std::int64_t columns : {5000, 20001}) all.emplace_back(2, columns);
  for (const std::int64_t rows : {63, 64, 65, 256, 300}) all.emplace_back(rows, 17);
  all.emplace_back(0, 17);
  return all;
}

LayerNorm exact(LayerNorm norm) {
  if (norm.weight.defined()) norm.weight = norm.weight.to(torch::kDouble);
  if (norm.bias.defined()) norm.bias = norm.bias.to(torch::kDouble);
  return norm;
}

// Layer norm with weight and bias and with neither, RMS norm with and without a weight.
std::vector<LayerNorm> norms(std::int64_t columns, c10::ScalarType weights) {
  const at::Tensor weight = torch::randn({columns}).to(weights);
  const at::Tensor bias = torch::randn({columns}).to(weights);
  return {{columns, true, 1e-5, weight, bias}, {columns, true, 1e-3, {}, {}},
          {columns, true, 1e-5, weight, {}},   {columns, true, 1e-5, {}, bias},
          {columns, false, 1e-6, weight, {}},  {columns, false, 1e-3, {}, {}}};
}

std::string name_of(const at::Tensor& input, const LayerNorm& norm) {
  return c10::str(dtype_name(input.scalar_type()), " ", input.sizes(),
                  norm.centred ? " layer norm" : " RMS norm",
                  norm.weight.defined() ? " weight" : "", norm.bias.defined() ? " bias" : "");
}

void expect_within(const at::Tensor& got, const at::Tensor& want, const at::Tensor& tolerance) {
  EXPECT_EQ(got.sizes(), want.sizes());
  EXPECT_TRUE((got.to(torch::kDouble) - want).abs().le(tolerance).all().item<bool>())
      << "got " << got << "\nwant " << want << "\nwithin " << tolerance;
}

// Half a unit of each value.
at::Tensor rounding(const at::Tensor& want, c10::ScalarType dtype) {
  return want.abs() * test::rounding_tolerance(dtype) + dtype_limits(dtype).min_subnormal / 2;
}

// The sizes of what is added up and cancels: rounding errors are in proportion to these. A mean is
// rounded to fp32, so its size counts in the distances from it.
struct Sizes {
  at::Tensor normal;  // of (input - mean) * rstd
  at::Tensor output;
  at::Tensor of_input;  // of the gradient's terms
  at::Tensor of_weight;
  at::Tensor of_bias;

  Sizes(const at::Tensor& input, const at::Tensor& grad, const LayerNorm& norm,
        const LayerNormResult& rows) {
    const auto shape = std::vector<std::int64_t>{rows.rstd.numel(), norm.columns};
    const at::Tensor x = input.reshape(shape);
    const at::Tensor rstd = rows.rstd.unsqueeze(1);
    const at::Tensor grad_output = grad.reshape(shape).abs();
    normal = x.abs().mul(rstd);
    if (norm.centred) {
      const at::Tensor mean = rows.mean.unsqueeze(1);
      normal = x.sub(mean).abs().add(mean.abs()).mul(rstd);
    }
    output = normal;
    at::Tensor g = grad_output;
    if (norm.weight.defined()) {
      output = output.mul(norm.weight.abs());
      g = g.mul(norm.weight.abs());
    }
    if (norm.bias.defined()) output = output.add(norm.bias.abs());
    const at::Tensor inner = g.mul(normal).mean(1, true);
    of_input = g.add(g.mean(1, true)).add(normal.mul(inner)).mul(rstd).view(input.sizes());
    output = output.view(input.sizes());
    of_weight = grad_output.mul(normal).sum(0);
    of_bias = grad_output.sum(0);
  }
};

// On every instruction set that this processor has.
class LayerNormKernels : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    torch::manual_seed(1);
  }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(LayerNormKernels, AreAsDefinedInFp64) {
  for (const auto dtype : kDtypes) {
    const auto wide = computed(dtype);
    for (const auto& [rows, columns] : shapes()) {
      const at::Tensor input = (torch::randn({rows, columns}) * 2 + 3).to(dtype);
      const at::Tensor grad = torch::randn({rows, columns}).to(dtype);
      const at::Tensor exact_input = input.to(torch::kDouble);
      const at::Tensor exact_grad = grad.to(torch::kDouble);
      const double unit = test::reduction_tolerance(wide, columns);
      // A column's sum is rounded at most so often: by 256 additions in a row, and by the few that
      // made its terms.
      const double column_unit = test::rounding_tolerance(wide) * (256 + 8);
      for (const LayerNorm& norm : norms(columns, dtype)) {
        SCOPED_TRACE(name_of(input, norm));
        const LayerNormResult want = ref::layer_norm(exact_input, exact(norm));
        const LayerNormResult got = layer_norm(input, norm, /*with_statistics=*/true);
        const Sizes sizes(exact_input, exact_grad, exact(norm), want);
        EXPECT_EQ(got.output.scalar_type(), dtype);
        expect_within(got.output, want.output, sizes.output * unit + rounding(want.output, dtype));
        EXPECT_EQ(got.mean.defined(), norm.centred);
        if (norm.centred) expect_close(got.mean, want.mean.to(wide), unit);
        expect_within(got.rstd, want.rstd, want.rstd * unit * (1 + sizes.normal.amax(1)));

        const LayerNormGradients gradients = layer_norm_backward(
            grad, input, got.mean, got.rstd, norm,
            {.input = true, .weight = norm.weight.defined(), .bias = norm.bias.defined()});
        const LayerNormGradients wanted = ref::layer_norm_backward(
            exact_grad, exact_input, want.mean, want.rstd, exact(norm),
            {.input = true, .weight = norm.weight.defined(), .bias = norm.bias.defined()});
        EXPECT_EQ(gradients.input.scalar_type(), dtype);
        expect_within(gradients.input, wanted.input,
                      sizes.of_input * unit + rounding(wanted.input, dtype));
        EXPECT_EQ(gradients.weight.defined(), norm.weight.defined());
        if (norm.weight.defined()) {
          EXPECT_EQ(gradients.weight.scalar_type(), dtype);
          expect_within(gradients.weight, wanted.weight,
                        sizes.of_weight * (column_unit + unit) + rounding(wanted.weight, dtype));
        }
        EXPECT_EQ(gradients.bias.defined(), norm.bias.defined());
        if (norm.bias.defined()) {
          expect_within(gradients.bias, wanted.bias,
                        sizes.of_bias * column_unit + rounding(wanted.bias, dtype));
        }
      }
    }
  }
}

TEST_P(LayerNormKernels, ComputeOnlyWhatIsWanted) {
  const at::Tensor input = torch::randn({9, 33});
  const at::Tensor grad = torch::randn({9, 33});
  const LayerNorm norm = norms(33, torch::kFloat).front();
  const LayerNormResult rows = layer_norm(input, norm, /*with_statistics=*/true);
  const LayerNormResult bare = layer_norm(input, norm, /*with_statistics=*/false);
  expect_bitwise_equal(bare.output, rows.output);
  EXPECT_FALSE(bare.mean.defined());
  EXPECT_FALSE(bare.rstd.defined());
  const auto all = layer_norm_backward(grad, input, rows.mean, rows.rstd, norm, {true, true, true});
  for (int wanted = 0; wanted < 8; ++wanted) {
    const LayerNormWanted some{(wanted & 1) != 0, (wanted & 2) != 0, (wanted & 4) != 0};
    const auto got = layer_norm_backward(grad, input, rows.mean, rows.rstd, norm, some);
    expect_bitwise_equal(got.input, some.input ? all.input : at::Tensor());
    expect_bitwise_equal(got.weight, some.weight ? all.weight : at::Tensor());
    expect_bitwise_equal(got.bias, some.bias ? all.bias : at::Tensor());
  }
}

TEST_P(LayerNormKernels, WeightsMayBeInFp32Beside16BitInputs) {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    const at::Tensor input = torch::randn({9, 70}).to(dtype);
    const at::Tensor grad = torch::randn({9, 70}).to(dtype);
    const LayerNorm norm = norms(70, torch::kFloat).front();
    const LayerNormResult rows = layer_norm(input, norm, /*with_statistics=*/true);
    EXPECT_TRUE(
        test::near(rows.output, ref::layer_norm(input.to(torch::kDouble), exact(norm)).output,
                   test::rounding_tolerance(dtype) + test::reduction_tolerance(torch::kFloat, 70)));
    const auto got =
        layer_norm_backward(grad, input, rows.mean, rows.rstd, norm, {true, true, true});
    // Nothing is rounded to 16 bits on the way to the parameters.
    const auto want =
        ref::layer_norm_backward(grad.to(torch::kDouble), input.to(torch::kDouble), rows.mean,
                                 rows.rstd, exact(norm), {true, true, true});
    expect_close(got.weight, want.weight.to(torch::kFloat),
                 test::reduction_tolerance(torch::kFloat, 9));
    expect_close(got.bias, want.bias.to(torch::kFloat),
                 test::reduction_tolerance(torch::kFloat, 9));
  }
}

TEST_P(LayerNormKernels, RowsOfEqualNumbersHaveNoVariance) {
  for (const std::int64_t columns : {1, 33, 1000}) {
    const LayerNorm norm{columns, true, 1e-5, {}, {}};
    for (const float value : {0.0F, 0.1F, 4097.0F, -1e20F}) {
      const auto rows =
          layer_norm(torch::full({3, columns}, value), norm, /*with_statistics=*/true);
      expect_bitwise_equal(rows.output, torch::zeros({3, columns}));
      expect_bitwise_equal(rows.mean, torch::full({3}, value));
    }
  }
}

TEST_P(LayerNormKernels, SmallVariancesOfLargeMeansAreKept) {
  const at::Tensor input = torch::randn({4, 1000}) + 4096;
  const LayerNorm norm{1000, true, 1e-5, {}, {}};
  const auto got = layer_norm(input, norm, /*with_statistics=*/true);
  const auto want = ref::layer_norm(input.to(torch::kDouble), norm);
  // Mean and distances are off by half a unit of 4096, 2.4e-4.
  EXPECT_TRUE((got.output - want.output).abs().le(3e-4).all().item<bool>());
  EXPECT_TRUE(test::near(got.rstd, want.rstd, 1e-6));
}

TEST_P(LayerNormKernels, NonFiniteValuesStayInTheirRow) {
  for (const bool centred : {true, false}) {
    for (const double bad :
         {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
      for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
        SCOPED_TRACE(c10::str(centred, " ", bad, " ", dtype));
        at::Tensor input = torch::randn({9, 37}).to(dtype);
        const at::Tensor grad = torch::randn({9, 37}).to(dtype);
        const at::Tensor weight = torch::ones({37});
        const LayerNorm norm{37, centred, 1e-5, weight, {}};
        const auto clean = layer_norm(input, norm, /*with_statistics=*/true);
        const auto clean_gradients =
            layer_norm_backward(grad, input, clean.mean, clean.rstd, norm, {true, true, false});
        input.index_put_({5, 36}, bad);
        const auto got = layer_norm(input, norm, /*with_statistics=*/true);
        const auto want = ref::layer_norm(input, norm);
        EXPECT_TRUE(got.output.isnan().equal(want.output.isnan())) << got.output;
        const auto gradients =
            layer_norm_backward(grad, input, got.mean, got.rstd, norm, {true, true, false});
        for (const std::int64_t row : {0, 4, 6, 8}) {
          expect_bitwise_equal(got.output[row], clean.output[row]);
          expect_bitwise_equal(gradients.input[row], clean_gradients.input[row]);
        }
        const auto want_gradients =
            ref::layer_norm_backward(grad, input, want.mean, want.rstd, norm, {true, true, false});
        EXPECT_TRUE(gradients.input.isnan().equal(want_gradients.input.isnan()));
        EXPECT_TRUE(gradients.weight.isnan().equal(want_gradients.weight.isnan()));
      }
    }
  }
}

// As LibTorch's: view() may follow.
TEST(LayerNorm, IsContiguousWithoutKernelsToo) {
  const at::Tensor transposed = torch::randn({24, 10}, torch::kDouble).t();
  const at::Tensor of_one = torch::randn({1, 24, 10}, torch::kDouble).transpose(1, 2);
  for (const at::Tensor& input : {transposed, of_one}) {
    for (const LayerNorm& norm : norms(24, torch::kDouble))
      EXPECT_TRUE(layer_norm(input, norm, true).output.is_contiguous());
  }
}

TEST_P(LayerNormKernels, AnyStridesGiveWhatDenseOnesGive) {
  const LayerNorm norm = norms(24, torch::kFloat).front();
  const at::Tensor transposed = torch::randn({24, 10}).t();
  const at::Tensor strided = torch::randn({10, 48}).slice(1, 0, 48, 2);
  const at::Tensor expanded = torch::randn({1, 24}).expand({10, 24});
  const at::Tensor negated = torch::_neg_view(torch::randn({10, 24}));
  for (const at::Tensor& input : {transposed, strided, expanded, negated}) {
    for (const at::Tensor& grad : {transposed, strided, expanded, negated}) {
      const at::Tensor dense_input = torch::empty({10, 24}).copy_(input);
      const at::Tensor dense_grad = torch::empty({10, 24}).copy_(grad);
      const auto got = layer_norm(input, norm, /*with_statistics=*/true);
      const auto want = layer_norm(dense_input, norm, /*with_statistics=*/true);
      expect_bitwise_equal(got.output, want.output);
      EXPECT_TRUE(got.output.is_contiguous());
      const auto gradients =
          layer_norm_backward(grad, input, got.mean, got.rstd, norm, {true, true, true});
      const auto wanted = layer_norm_backward(dense_grad, dense_input, got.mean, got.rstd, norm,
                                              {true, true, true});
      expect_bitwise_equal(gradients.input, wanted.input);
      expect_bitwise_equal(gradients.weight, wanted.weight);
      expect_bitwise_equal(gradients.bias, wanted.bias);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, LayerNormKernels,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) {
                           return std::string(hwy::TargetName(target.param));
                         });

TEST(LayerNormThreads, HaveNoPartInTheResults) {
  const int before = at::get_num_threads();
  torch::manual_seed(2);
  for (const bool centred : {true, false}) {
    for (const std::int64_t rows : {1, 17, 64, 1000, 2000}) {
      const at::Tensor input = torch::randn({rows, 129});
      const at::Tensor grad = torch::randn({rows, 129});
      const LayerNorm norm{129, centred, 1e-5, torch::randn({129}),
                           centred ? torch::randn({129}) : at::Tensor()};
      const LayerNormWanted wanted{true, true, centred};
      at::set_num_threads(1);
      const auto one = layer_norm(input, norm, /*with_statistics=*/true);
      const auto one_gradients = layer_norm_backward(grad, input, one.mean, one.rstd, norm, wanted);
      for (const int threads : {2, 3, 5, 64}) {
        at::set_num_threads(threads);
        const auto more = layer_norm(input, norm, /*with_statistics=*/true);
        const auto gradients = layer_norm_backward(grad, input, one.mean, one.rstd, norm, wanted);
        expect_bitwise_equal(more.output, one.output);
        expect_bitwise_equal(more.rstd, one.rstd);
        expect_bitwise_equal(gradients.input, one_gradients.input);
        expect_bitwise_equal(gradients.weight, one_gradients.weight);
        expect_bitwise_equal(gradients.bias, one_gradients.bias);
      }
    }
  }
  at::set_num_threads(before);
}

TEST(LayerNormThreads, ShareFewRows) {
  std::mutex mutex;
  std::vector<int> seen(64);
  int parts = 0;
  RowParts(64, 1024).add_up(0, [&](std::size_t begin, std::size_t end, float*) {
    const std::lock_guard lock(mutex);
    ++parts;
    for (std::size_t row = begin; row < end; ++row) ++seen.at(row);
  });
  EXPECT_EQ(parts, 4);
  EXPECT_EQ(seen, std::vector<int>(64, 1));
}

TEST(LayerNormSums, OfManyEqualTermsAreExact) {
  // 100,000 gradients of 0.1: each fp32 sum of 256 is rounded, but not the sum of them.
  const at::Tensor grad = torch::full({100000, 3}, 0.1F);
  const LayerNorm norm{3, true, 1e-5, torch::ones({3}), torch::zeros({3})};
  const at::Tensor input = torch::randn({100000, 3});
  const auto rows = layer_norm(input, norm, /*with_statistics=*/true);
  const auto got =
      layer_norm_backward(grad, input, rows.mean, rows.rstd, norm, {false, false, true});
  expect_close(got.bias, torch::full({3}, 1e4F), 5e-6);
}

}  // namespace
}  // namespace semitone::kernels::layer_norm_test
