// GELU against its reference and against fp64.

#include "src/kernels/gelu.h"

#include "semitone/core/dtype.h"
#include "src/core/dtype_limits.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace semitone::kernels::gelu_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_close;

constexpr GeluForm kForms[] = {GeluForm::erf, GeluForm::tanh};
constexpr c10::ScalarType kDtypes[] = {torch::kFloat, torch::kHalf, torch::kBFloat16,
                                       torch::kDouble};

const char* name_of(GeluForm form) {
  return form == GeluForm::erf ? "erf" : "tanh";
}

// In fp64, accurate in both tails, as 1 + erf is not.
struct Exact {
  at::Tensor value;
  at::Tensor slope;

  Exact(const at::Tensor& input, GeluForm form) {
    const at::Tensor x = input.to(torch::kDouble);
    if (form == GeluForm::erf) {
      const at::Tensor below = torch::erfc(x / -std::sqrt(2)) / 2;
      const at::Tensor density = (x.square() / -2).exp() / std::sqrt(2 * M_PI);
      value = x * below;
      slope = below + x * density;
    } else {
      const double root = std::sqrt(2 / M_PI);
      const at::Tensor twice = 2 * root * (x + 0.044715 * x.pow(3));
      value = x * twice.sigmoid();
      slope = twice.sigmoid() +
              x * twice.sigmoid() * (-twice).sigmoid() * 2 * root * (1 + 3 * 0.044715 * x.square());
    }
  }
};

// Every number of a 16-bit dtype that is finite.
at::Tensor all_numbers(c10::ScalarType dtype) {
  const at::Tensor all = torch::arange(0, 65536, torch::kInt).to(torch::kShort).view(dtype);
  return all.masked_select(all.isfinite()).contiguous();
}

// fp32 numbers of either sign, evenly by their bits from 2^-126 to 40.
at::Tensor sweep() {
  const at::Tensor positive =
      torch::arange(0x00800000, 0x42200000, 4001, torch::kInt).view(torch::kFloat);
  return torch::cat({positive, positive.neg()});
}

// Half a unit of each value.
at::Tensor rounding(const at::Tensor& want, c10::ScalarType dtype) {
  return want.abs() * test::rounding_tolerance(dtype) + dtype_limits(dtype).min_subnormal / 2;
}

// The tolerance of the value. The error from rounding the exponential's argument grows with its
// size, and P(X > x) is approximated more roughly if it will be rounded to 16 bits.
at::Tensor allowed(const at::Tensor& x, const at::Tensor& want, GeluForm form,
                   c10::ScalarType dtype) {
  const at::Tensor wide = x.to(torch::kDouble);
  const bool rough = form == GeluForm::erf && dtype != torch::kFloat;
  const double near = rough ? 5e-6 : test::pointwise_tolerance(torch::kFloat);
  const double far = form == GeluForm::erf ? 5e-6 : 1.3e-5;
  at::Tensor relative = torch::where(wide.lt(-3), far, near);
  if (rough) relative = torch::where(wide.lt(-7), 0.03, relative);
  return want.abs() * relative + rounding(want, dtype) + (rough ? 1e-19 : 0x1p-100);
}

void expect_within(const at::Tensor& got, const at::Tensor& want, const at::Tensor& tolerance,
                   const at::Tensor& at) {
  const at::Tensor bad = (got.to(torch::kDouble) - want).abs().le(tolerance).logical_not();
  if (!bad.any().item<bool>()) return;
  const auto first = bad.nonzero()[0][0].item<std::int64_t>();
  ADD_FAILURE() << bad.sum().item<std::int64_t>() << " of " << bad.numel()
                << " are off, the first at " << at[first].item<double>() << ": got "
                << got[first].item<double>() << ", want " << want[first].item<double>();
}

// On every instruction set that this processor has.
class GeluKernels : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    torch::manual_seed(1);
  }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(GeluKernels, AreAccurateForEveryNumber) {
  for (const GeluForm form : kForms) {
    for (const at::Tensor& x :
         {sweep(), all_numbers(torch::kHalf), all_numbers(torch::kBFloat16)}) {
      const auto dtype = x.scalar_type();
      SCOPED_TRACE(c10::str(name_of(form), " ", dtype_name(dtype)));
      const Exact want(x, form);
      // Finite everywhere: what the formula makes of huge numbers in fp64 is not.
      const at::Tensor finite = want.value.isfinite().logical_and(want.slope.isfinite());
      const at::Tensor value = torch::where(finite, want.value, x.to(torch::kDouble).clamp_min(0));
      const at::Tensor slope = torch::where(finite, want.slope, x.gt(0).to(torch::kDouble));
      expect_within(gelu(x, {}, form), value, allowed(x, value, form, dtype), x);
      const at::Tensor got = gelu_backward(torch::ones_like(x), x, {}, form, false).input;
      expect_within(got, slope, rounding(slope, dtype) + test::pointwise_tolerance(torch::kFloat),
                    x);
    }
  }
}

TEST_P(GeluKernels, AreAsDefinedForEverySize) {
  for (const auto dtype : kDtypes) {
    const auto wide = dtype == torch::kDouble ? dtype : torch::kFloat;
    const double tolerance = test::rounding_tolerance(dtype) +
                             (is_16bit(dtype) ? 5e-6 : test::pointwise_tolerance(wide));
    std::vector<std::int64_t> sizes;
    for (std::int64_t size = 0; size <= 70; ++size) sizes.push_back(size);
    for (const std::int64_t columns : sizes) {
      for (const std::int64_t rows : {1, 5, 300}) {
        if (rows == 300 && columns % 23 != 0) continue;
        const at::Tensor input = (torch::randn({rows, columns}) * 2).to(dtype);
        const at::Tensor grad = torch::randn({rows, columns}).to(dtype);
        for (const at::Tensor& bias :
             {at::Tensor(), torch::randn({columns}).to(dtype), torch::randn({columns})}) {
          for (const GeluForm form : kForms) {
            SCOPED_TRACE(c10::str(dtype_name(dtype), " ", input.sizes(), " ", name_of(form),
                                  bias.defined() ? " bias" : ""));
            const at::Tensor exact_bias = bias.defined() ? bias.to(torch::kDouble) : bias;
            const at::Tensor got = gelu(input, bias, form);
            EXPECT_EQ(got.scalar_type(), dtype);
            EXPECT_TRUE(
                test::near(got, ref::gelu(input.to(torch::kDouble), exact_bias, form), tolerance));
            const auto gradients = gelu_backward(grad, input, bias, form, bias.defined());
            const auto want = ref::gelu_backward(grad.to(torch::kDouble), input.to(torch::kDouble),
                                                 exact_bias, form, bias.defined());
            EXPECT_EQ(gradients.input.scalar_type(), dtype);
            // A slope is of size 1, and is near 0 where it changes sign.
            const at::Tensor off = (gradients.input.to(torch::kDouble) - want.input).abs();
            EXPECT_TRUE(off.le(rounding(want.input, dtype) +
                               grad.to(torch::kDouble).abs() * 2 * test::pointwise_tolerance(wide))
                            .all()
                            .item<bool>());
            EXPECT_EQ(gradients.bias.defined(), bias.defined());
            if (!bias.defined()) continue;
            EXPECT_EQ(gradients.bias.scalar_type(), bias.scalar_type());
            const double sum_tolerance = test::rounding_tolerance(bias.scalar_type()) +
                                         test::rounding_tolerance(wide) * (256 + 8);
            const at::Tensor sizes_of = grad.to(torch::kDouble).abs().sum(0) * 1.2;
            EXPECT_TRUE((gradients.bias.to(torch::kDouble) - want.bias)
                            .abs()
                            .le(sizes_of * sum_tolerance)
                            .all()
                            .item<bool>());
          }
        }
      }
    }
  }
}

TEST_P(GeluKernels, NonFiniteNumbersGiveWhatTheFormulaGives) {
  constexpr auto kInf = std::numeric_limits<float>::infinity();
  constexpr auto kNan = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor input = torch::tensor({kInf, -kInf, kNan, 1.0F, 0.0F, -0.0F, -1.0F}).repeat({5});
  const at::Tensor grad = torch::ones_like(input);
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
    for (const GeluForm form : kForms) {
      const at::Tensor x = input.to(dtype);
      const double tolerance = test::pointwise_tolerance(dtype);
      // In fp64: LibTorch's fp32 code makes NaN of the value at infinity.
      const at::Tensor exact = x.to(torch::kDouble);
      EXPECT_TRUE(test::near(gelu(x, {}, form), ref::gelu(exact, {}, form), tolerance));
      EXPECT_TRUE(test::near(
          gelu_backward(grad.to(dtype), x, {}, form, false).input,
          ref::gelu_backward(grad.to(torch::kDouble), exact, {}, form, false).input, tolerance));
    }
  }
}

TEST_P(GeluKernels, HugeNumbersAreFinite) {
  const at::Tensor input = torch::tensor({1e20F, 3e38F, -1e20F, -3e38F}).repeat({5});
  for (const GeluForm form : kForms) {
    expect_bitwise_equal(gelu(input, {}, form), torch::where(input.gt(0), input, -0.0F));
    const at::Tensor slope = gelu_backward(torch::ones_like(input), input, {}, form, false).input;
    EXPECT_TRUE(slope.eq(input.gt(0).to(torch::kFloat)).all().item<bool>()) << slope;
  }
}

TEST_P(GeluKernels, LayoutsStay) {
  const at::Tensor channels_last =
      torch::randn({2, 5, 3, 7}).contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor transposed = torch::randn({24, 10}).t();
  const at::Tensor strided = torch::randn({10, 48}).slice(1, 0, 48, 2);
  const at::Tensor negated = torch::_neg_view(torch::randn({10, 24}));
  const at::Tensor part =
      torch::randn({2, 10, 3, 7}).contiguous(at::MemoryFormat::ChannelsLast).narrow(1, 0, 5);
  for (const at::Tensor& input : {channels_last, transposed, strided, negated, part}) {
    const at::Tensor dense = torch::empty(input.sizes()).copy_(input);
    const at::Tensor got = gelu(input, {}, GeluForm::erf);
    expect_bitwise_equal(got, gelu(dense, {}, GeluForm::erf));
    const at::Tensor grad = torch::randn(input.sizes());
    expect_bitwise_equal(gelu_backward(grad, input, {}, GeluForm::erf, false).input,
                         gelu_backward(grad, dense, {}, GeluForm::erf, false).input);
    const at::Tensor expanded = torch::ones({}).expand(input.sizes());
    expect_bitwise_equal(
        gelu_backward(expanded, input, {}, GeluForm::erf, false).input,
        gelu_backward(torch::ones(input.sizes()), dense, {}, GeluForm::erf, false).input);
    EXPECT_EQ(got.strides(), at::gelu(input).strides());
    EXPECT_EQ(gelu_backward(grad, input, {}, GeluForm::erf, false).input.strides(), got.strides());
    const at::Tensor bias = torch::randn({input.size(-1)});
    expect_bitwise_equal(gelu(input, bias, GeluForm::tanh), gelu(dense, bias, GeluForm::tanh));
    const auto with_bias = gelu_backward(grad, input, bias, GeluForm::tanh, true);
    const auto want = gelu_backward(grad, dense, bias, GeluForm::tanh, true);
    expect_bitwise_equal(with_bias.input, want.input);
    expect_bitwise_equal(with_bias.bias, want.bias);
  }
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, GeluKernels,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) {
                           return std::string(hwy::TargetName(target.param));
                         });

TEST(GeluThreads, HaveNoPartInTheResults) {
  const int before = at::get_num_threads();
  torch::manual_seed(2);
  for (const std::int64_t rows : {1, 17, 64, 2000}) {
    const at::Tensor input = torch::randn({rows, 129});
    const at::Tensor grad = torch::randn({rows, 129});
    const at::Tensor bias = torch::randn({129});
    at::set_num_threads(1);
    const at::Tensor one = gelu(input, {}, GeluForm::erf);
    const auto one_gradients = gelu_backward(grad, input, bias, GeluForm::erf, true);
    for (const int threads : {2, 3, 5, 64}) {
      at::set_num_threads(threads);
      const auto gradients = gelu_backward(grad, input, bias, GeluForm::erf, true);
      expect_bitwise_equal(gelu(input, {}, GeluForm::erf), one);
      expect_bitwise_equal(gradients.input, one_gradients.input);
      expect_bitwise_equal(gradients.bias, one_gradients.bias);
    }
  }
  at::set_num_threads(before);
}

}  // namespace
}  // namespace semitone::kernels::gelu_test
