// The generator against its authors' numbers, dropout against its reference.

#include "src/kernels/dropout.h"

#include "semitone/core/dtype.h"
#include "src/kernels/dropout_kernel.h"
#include "tests/support/tensors.h"

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace semitone::kernels::dropout_test {
namespace {

using test::expect_bitwise_equal;

// From the file kat_vectors of Random123, the library of the generator's authors.
TEST(Philox, GivesTheKnownAnswers) {
  constexpr std::uint32_t kAll = 0xFFFFFFFF;
  const PhiloxBlock pi{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344};
  const PhiloxKey more_pi{0xa4093822, 0x299f31d0};
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}, 7),
            (PhiloxBlock{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}));
  EXPECT_EQ(philox({kAll, kAll, kAll, kAll}, {kAll, kAll}, 7),
            (PhiloxBlock{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}));
  EXPECT_EQ(philox(pi, more_pi, 7), (PhiloxBlock{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}));
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}, 10),
            (PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({kAll, kAll, kAll, kAll}, {kAll, kAll}, 10),
            (PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox(pi, more_pi, 10), (PhiloxBlock{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, CountersAndKeysUseAllBitsOfAStream) {
  const PhiloxStream stream{.seed = 0x1111222233334444, .offset = 0x5555666677778888};
  EXPECT_EQ(key_of(stream), (PhiloxKey{0x33334444, 0x11112222}));
  EXPECT_EQ(counter_of(stream, 0x9999AAAABBBBCCCC),
            (PhiloxBlock{0xBBBBCCCC, 0x9999AAAA, 0x77778888, 0x55556666}));
}

TEST(Dropout, RoundsTheProbabilityAndScalesForTheRoundedOne) {
  const auto threshold = [](double p) { return Dropout(p, {1}).threshold(); };
  EXPECT_EQ(threshold(0), 0U);
  EXPECT_EQ(threshold(0x0.FFp-17), 0U);
  EXPECT_EQ(threshold(0.1), 6554U);
  EXPECT_EQ(threshold(0.5), 32768U);
  EXPECT_EQ(threshold(1 - 0x1p-20), 65535U);
  EXPECT_EQ(threshold(1), 65536U);
  EXPECT_EQ(Dropout(0.1, {1}).scale(), 65536.0 / (65536 - 6554));
  EXPECT_EQ(Dropout(0, {1}).scale(), 1);
  EXPECT_EQ(Dropout(1, {1}).scale(), 0);
}

// Sizes around those of a vector and of a group, every layout, and more than one thread's share.
std::vector<at::Tensor> inputs(c10::ScalarType dtype) {
  const auto random = [&](at::IntArrayRef shape) { return torch::randn(shape).to(dtype); };
  std::vector<at::Tensor> all;
  for (const std::int64_t size : {0, 1, 17, 127, 128, 129, 300}) all.push_back(random({size}));
  all.push_back(torch::tensor(2.5).to(dtype));
  all.push_back(random({3, 30, 399}));
  all.push_back(random({2, 5, 7, 3}).contiguous(at::MemoryFormat::ChannelsLast));
  all.push_back(random({40, 30}).t());
  all.push_back(random({40, 30}).slice(1, 3, 20));
  all.push_back(random({1, 30}).expand({10, 30}));
  return all;
}

std::string name_of(const at::Tensor& tensor) {
  return c10::str(dtype_name(tensor.scalar_type()), " ", tensor.sizes(), " strides ",
                  tensor.strides());
}

at::Tensor kept(const at::Tensor& result) {
  return result.ne(0);
}

class DropoutKernels : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    torch::manual_seed(1);
  }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(DropoutKernels, AsDefined) {
  constexpr PhiloxStream kStream{.seed = 0x0123456789ABCDEF, .offset = 0xFEDCBA9876543210};
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16, torch::kDouble}) {
    for (const at::Tensor& input : inputs(dtype)) {
      SCOPED_TRACE(name_of(input));
      for (const double p : {0.0, 0.1, 1 - 0x1p-20, 1.0}) {
        SCOPED_TRACE(p);
        const Dropout how(p, kStream);
        for (const auto to : {dtype, torch::kFloat, torch::kBFloat16}) {
          const at::Tensor got = dropout(input, how, to);
          expect_bitwise_equal(got, ref::dropout(input, how, to));
          EXPECT_EQ(got.scalar_type(), to);
          EXPECT_TRUE(got.is_non_overlapping_and_dense());
          if (input.is_non_overlapping_and_dense()) {
            EXPECT_EQ(got.strides(), input.strides());
          }
          for (const auto other : {to, torch::kBFloat16}) {
            if (c10::promoteTypes(other, to) != to) continue;
            const at::Tensor residual = torch::randn(input.sizes()).to(other);
            expect_bitwise_equal(dropout(input, how, to, residual),
                                 ref::dropout(input, how, to, residual));
          }
        }
      }
    }
  }
}

// Computed again from the generator, by neither the kernel's method nor the reference's.
TEST_P(DropoutKernels, ElementsAreDroppedByTheirOwnRandomNumber) {
  const PhiloxStream stream{.seed = 77, .offset = 5};
  constexpr std::uint32_t kThreshold = 20000;
  const std::int64_t size = 40 * 1024 + 77;
  const at::Tensor got =
      dropout(torch::ones({size}), Dropout(kThreshold / 65536.0, stream), torch::kFloat);
  const auto* const values = got.const_data_ptr<float>();
  for (std::int64_t i = 0; i < size; ++i) {
    const auto group = static_cast<std::uint64_t>(i / 128);
    const auto sixteenth = static_cast<std::uint64_t>(i % 16);
    const PhiloxBlock block = philox(counter_of(stream, group * 16 + sixteenth), key_of(stream));
    const auto half = static_cast<std::size_t>(i % 128 / 16);
    const std::uint32_t number = half % 2 == 0 ? block[half / 2] & 0xFFFF : block[half / 2] >> 16;
    const float want = number < kThreshold ? 0 : 65536.0F / (65536 - kThreshold);
    ASSERT_EQ(values[i], want) << i;
  }
}

TEST_P(DropoutKernels, InfinityAndNanGoOnAsInLibTorch) {
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16, torch::kDouble}) {
    const at::Tensor ones = torch::ones({1000}, dtype);
    for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
      const Dropout how(0.5, {3});
      const at::Tensor got = dropout(ones * bad, how, dtype);
      const at::Tensor stays = kept(dropout(ones, how, dtype));
      expect_bitwise_equal(got, at::where(stays, bad, std::nan("")).to(dtype));
      // A dropped infinity is NaN there too.
      const at::Tensor theirs = at::dropout(ones * bad, 0.5, true);
      EXPECT_EQ(theirs.isnan().any().item<bool>(), got.isnan().any().item<bool>());
      EXPECT_FALSE(theirs.isfinite().any().item<bool>());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, DropoutKernels,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) {
                           return std::string(hwy::TargetName(target.param));
                         });

TEST(DropoutKernelsMask, ThreadsHaveNoPartInIt) {
  const int before = at::get_num_threads();
  const at::Tensor input = torch::ones({1'000'003});
  const Dropout how(0.3, {9});
  at::set_num_threads(1);
  const at::Tensor one = dropout(input, how, torch::kFloat);
  at::set_num_threads(3);
  const at::Tensor three = dropout(input, how, torch::kFloat);
  at::set_num_threads(before);
  expect_bitwise_equal(three, one);
}

TEST(DropoutKernelsMask, DtypesHaveNoPartInIt) {
  const Dropout how(0.3, {9});
  const at::Tensor input = torch::ones({5000});
  const at::Tensor fp32 = kept(dropout(input, how, torch::kFloat));
  for (const auto dtype : {torch::kHalf, torch::kBFloat16, torch::kDouble}) {
    expect_bitwise_equal(kept(dropout(input.to(dtype), how, dtype)), fp32);
    expect_bitwise_equal(kept(dropout(input, how, dtype)), fp32);
  }
}

// A share of n elements is off by more than 5 sigma once in two million.
void expect_share(const at::Tensor& mask, double share) {
  const auto n = static_cast<double>(mask.numel());
  const double got = mask.to(torch::kDouble).mean().item<double>();
  EXPECT_LE(std::abs(got - share), 5 * std::sqrt(share * (1 - share) / n)) << share;
}

TEST(DropoutKernelsMask, KeepsTheShareItShould) {
  for (const double p : {1.0 / 65536, 0.1, 0.25, 0.5, 0.9}) {
    const Dropout how(p, {.seed = 123456789});
    const double exact = how.threshold() / 65536.0;
    expect_share(kept(dropout(torch::ones({4'000'000}), how, torch::kFloat)), 1 - exact);
  }
}

// Pairs at distances where elements share a word, a block, a vector or nothing.
TEST(DropoutKernelsMask, ElementsAreIndependentOfEachOther) {
  const Dropout how(0.25, {.seed = 42});
  const at::Tensor mask = kept(dropout(torch::ones({4'000'000}), how, torch::kFloat));
  for (const std::int64_t away : {1, 2, 8, 15, 16, 17, 32, 112, 127, 128, 2048}) {
    SCOPED_TRACE(away);
    const at::Tensor both = mask.slice(0, 0, -away).logical_and(mask.slice(0, away, mask.size(0)));
    expect_share(both, 0.75 * 0.75);
  }
}

TEST(DropoutKernelsMask, StreamsAreIndependentOfEachOther) {
  const auto mask_of = [](const PhiloxStream& stream) {
    return kept(dropout(torch::ones({1'000'000}), Dropout(0.5, stream), torch::kFloat));
  };
  const at::Tensor mask = mask_of({.seed = 1, .offset = 0});
  for (const PhiloxStream& other : {PhiloxStream{.seed = 2, .offset = 0},
                                    {.seed = 1 + (1ULL << 32), .offset = 0},
                                    {.seed = 1, .offset = 1},
                                    {.seed = 1, .offset = 1ULL << 32}}) {
    expect_share(mask.eq(mask_of(other)), 0.5);
  }
  expect_bitwise_equal(mask_of({.seed = 1, .offset = 0}), mask);
}

}  // namespace
}  // namespace semitone::kernels::dropout_test
