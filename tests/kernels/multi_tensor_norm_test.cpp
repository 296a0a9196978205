#include "src/kernels/multi_tensor_norm.h"

#include "src/kernels/flat.h"
#include "src/kernels/kernels.h"
#include "tests/support/errors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace semitone::kernels::multi_tensor_norm_test {
namespace {

using test::expect_error;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// fp64 sums of up to 50 000 squares in different orders.
constexpr double kRelative = 1e-13;

void expect_as_defined(const std::vector<at::Tensor>& tensors, double p) {
  const std::vector<double> got = multi_tensor_norms(tensors, p);
  ASSERT_EQ(got.size(), tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const double want = ref::norm(tensors[i], p).item<double>();
    EXPECT_TRUE(got[i] == want || std::abs(got[i] - want) <= kRelative * want ||
                (std::isnan(got[i]) && std::isnan(want)))
        << "tensor " << i << ", p " << p << ": got " << got[i] << ", want " << want;
  }
}

class MultiTensorNorms : public testing::TestWithParam<c10::ScalarType> {
 protected:
  void SetUp() override { torch::manual_seed(21); }
};

TEST_P(MultiTensorNorms, AreTheirDefinitionAtEverySizeAndLayout) {
  std::vector<at::Tensor> tensors;
  for (std::int64_t size = 0; size < 35; ++size)
    tensors.push_back(torch::randn({size}).to(GetParam()));
  for (const std::int64_t size : {kChunk - 1, kChunk, kChunk + 1, 3 * kChunk + 5})
    tensors.push_back(torch::randn({size}).to(GetParam()));
  tensors.push_back(torch::randn({}).to(GetParam()));
  tensors.push_back(torch::randn({5, 7}).to(GetParam()).t());
  tensors.push_back(torch::randn({5, 14}).to(GetParam()).slice(1, 0, 14, 2));
  tensors.push_back(torch::randn({1, 7}).to(GetParam()).expand({3, 7}));
  tensors.push_back(at::_neg_view(torch::randn({9}).to(GetParam())));
  for (const double p : {2.0, kInfinity, 1.0, 3.5}) expect_as_defined(tensors, p);
}

TEST_P(MultiTensorNorms, AreNotFiniteWhereAnElementIsNot) {
  const std::int64_t size = kChunk + 21;
  for (const double bad : {kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
    for (const std::int64_t component : {std::int64_t{0}, std::int64_t{5}, size / 2, size - 1}) {
      auto tensor = torch::randn({size}).to(GetParam());
      tensor[component] = bad;
      auto both = tensor.clone();
      both[7] = kInfinity;
      for (const double p : {2.0, kInfinity, 3.0})
        expect_as_defined({tensor, both, torch::ones({3})}, p);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, MultiTensorNorms,
                         testing::Values(at::kFloat, at::kHalf, at::kBFloat16, at::kDouble),
                         [](const auto& which) { return std::string(c10::toString(which.param)); });

TEST(MultiTensorNormsOf, LargeFp32NumbersDoNotOverflow) {
  EXPECT_NEAR(multi_tensor_norms(std::vector<at::Tensor>{torch::full({4}, 1e38)}, 2)[0], 2e38,
              3e31);
  EXPECT_NEAR(multi_tensor_norms(std::vector<at::Tensor>{torch::full({4}, 1e-40)}, 2)[0], 2e-40,
              1e-44);
}

// The largest number so far grows from one to the next, or only once, or is the first one.
TEST(MultiTensorNormsOf, NumbersOfDifferentSizesKeepTheirDigits) {
  torch::manual_seed(23);
  constexpr std::int64_t kSize = 20000;
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const double spread : {1.0, 6.0, 14.0, 60.0, 120.0}) {
      if (dtype == at::kHalf && spread > 14) continue;
      const at::Tensor growing = torch::linspace(-spread, spread, kSize, at::kDouble);
      for (const at::Tensor& exponents :
           {growing, growing.flip(0), growing.index_select(0, torch::randperm(kSize))}) {
        const at::Tensor sizes = exponents.exp2() * (1 + torch::rand(kSize, at::kDouble)) / 2;
        expect_as_defined({sizes.to(dtype), sizes.neg().to(dtype), sizes.mul(1e-30).to(dtype)}, 2);
      }
    }
  }
}

TEST(MultiTensorNormsOf, TheSameNumbersDoNotDependOnThreads) {
  torch::manual_seed(22);
  const int before = at::get_num_threads();
  const std::vector<at::Tensor> tensors{torch::randn({300000}), torch::randn({10}),
                                        torch::randn({70000})};
  at::set_num_threads(1);
  const auto want = multi_tensor_norms(tensors, 2);
  for (const int threads : {2, 3, 7}) {
    at::set_num_threads(threads);
    EXPECT_EQ(multi_tensor_norms(tensors, 2), want);
  }
  at::set_num_threads(before);
}

TEST(TotalNorm, IsThatOfAllElements) {
  const std::vector<double> norms{3, 0, 4};
  EXPECT_DOUBLE_EQ(total_norm(norms, 2), 5);
  EXPECT_DOUBLE_EQ(total_norm(norms, 1), 7);
  EXPECT_DOUBLE_EQ(total_norm(norms, kInfinity), 4);
  EXPECT_DOUBLE_EQ(total_norm(norms, 3), std::cbrt(27 + 64));
  EXPECT_EQ(total_norm({}, 2), 0);
  const std::vector<double> with_nan{1, std::nan(""), 2};
  EXPECT_TRUE(std::isnan(total_norm(with_nan, 2)));
  EXPECT_TRUE(std::isnan(total_norm(with_nan, kInfinity)));
}

TEST(MultiTensorNormsErrors, NameWhatIsWrong) {
  const auto norm = [](const at::Tensor& tensor, double p = 2) {
    return [=] { multi_tensor_norms({&tensor, 1}, p); };
  };
  expect_error(norm(torch::ones({2}, at::kInt)), {"[kernels.multi_tensor_norms]", "int32"});
  expect_error(norm(torch::ones({2}).to_sparse()), {"Sparse"});
  expect_error(norm({}), {"undefined"});
  expect_error(norm(torch::ones({2}), 0), {"positive order"});
  expect_error(norm(torch::ones({2}), std::nan("")), {"positive order"});
}

class NormTargets : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(NormTargets, SeesEveryElementOnce) {
  for (std::size_t size = 0; size < 70; ++size) {
    std::vector<float> numbers(size);
    double squares = 0;
    for (std::size_t i = 0; i < size; ++i) {
      numbers[i] = static_cast<float>(i) * (i % 2 == 0 ? 1.0F : -1.0F);
      squares += static_cast<double>(i * i);
    }
    EXPECT_EQ(sum_of_squares(numbers.data(), Format::fp32, size), squares);  // exact in fp64
    EXPECT_EQ(max_magnitude(numbers.data(), Format::fp32, size),
              size == 0 ? 0.0F : static_cast<float>(size - 1));
    for (std::size_t i = 0; i < size; ++i) {
      const float kept = numbers[i];
      numbers[i] = std::numeric_limits<float>::quiet_NaN();
      EXPECT_TRUE(std::isnan(sum_of_squares(numbers.data(), Format::fp32, size)));
      EXPECT_TRUE(std::isnan(max_magnitude(numbers.data(), Format::fp32, size)));
      numbers[i] = kept;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, NormTargets,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) {
                           return std::string(hwy::TargetName(target.param));
                         });

}  // namespace
}  // namespace semitone::kernels::multi_tensor_norm_test
