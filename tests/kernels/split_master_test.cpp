// fp32 masters as a bf16 parameter and 16 more bits.

#include "src/kernels/multi_tensor_update.h"
#include "src/kernels/rounding.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace semitone::kernels::split_master_test {
namespace {

using test::expect_bitwise_equal;

TEST(SplitMaster, GivesEveryKindOfNumberBack) {
  // All upper halves, with lower halves around the edges.
  std::int64_t ties = 0;
  for (std::uint32_t high = 0; high <= 0xFFFF; ++high) {
    for (const std::uint32_t low : {0U, 1U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
      const std::uint32_t bits = (high << 16) | low;
      const SplitFp32 split = split_fp32(bits);
      const auto value = std::bit_cast<float>(bits);
      const std::uint32_t joined = join_fp32(split);
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(std::bit_cast<float>(joined))) << bits;
        ASSERT_TRUE(std::isnan(std::bit_cast<float>(fp32_from_bf16(split.high)))) << bits;
        continue;
      }
      ASSERT_EQ(joined, bits);
      // Rounded to nearest; a tie goes away from zero.
      if (low == 0x8000) {
        ++ties;
        ASSERT_EQ(split.high, high + 1);
      } else {
        ASSERT_EQ(split.high, bf16_from_fp32(bits)) << bits;
      }
    }
  }
  EXPECT_GT(ties, 60000);
}

TEST(SplitMaster, AForeignUpperHalfMovesByAtMostHalfItsUnit) {
  for (std::uint32_t high = 0; high <= 0xFFFF; ++high) {
    const auto own = std::bit_cast<float>(fp32_from_bf16(static_cast<std::uint16_t>(high)));
    if (!std::isfinite(own)) continue;
    for (const int distance : {0x0001, 0x7FFF, 0x8000, 0xFFFF}) {
      const auto low = static_cast<std::uint16_t>(distance);
      const auto joined = std::bit_cast<float>(join_fp32({static_cast<std::uint16_t>(high), low}));
      ASSERT_FALSE(std::isnan(joined)) << high << " " << low;
      const auto again = split_fp32(std::bit_cast<std::uint32_t>(joined)).high;
      ASSERT_EQ(again, high) << low;
    }
  }
}

TEST(SplitMaster, OfALargeTensorIsThatOfItsRows) {
  torch::manual_seed(5);
  const at::Tensor value = torch::randn({3, 700001});
  const auto split = [](const at::Tensor& of) {
    Update item;
    item.param = at::empty(of.sizes(), at::kBFloat16);
    item.low = at::empty(of.sizes(), at::kShort);
    split_master(of, item.param, item.low);
    return item;
  };
  const Update whole = split(value);
  for (std::int64_t row = 0; row < value.size(0); ++row) {
    const Update want = split(value[row]);
    expect_bitwise_equal(whole.param[row], want.param);
    expect_bitwise_equal(whole.low[row], want.low);
  }
}

TEST(SplitMaster, OfTensorsIsThatOfNumbers) {
  torch::manual_seed(4);
  at::Tensor bits = torch::randint(std::numeric_limits<std::int32_t>::min(),
                                   std::numeric_limits<std::int32_t>::max(), {40000}, at::kInt);
  const at::Tensor low = at::empty({40000}, at::kShort);
  const at::Tensor param = at::empty({40000}, at::kBFloat16);
  split_master(bits.view(at::kFloat), param, low);
  const at::Tensor joined = join_split_master(param, low);
  expect_bitwise_equal(joined, bits.view(at::kFloat));
  const at::Tensor foreign = torch::randint(-32768, 32768, {40000}, at::kShort);
  const at::Tensor foreign_joined = join_split_master(param, foreign).view(at::kInt);
  for (std::int64_t i = 0; i < 40000; ++i) {
    const SplitFp32 want = split_fp32(static_cast<std::uint32_t>(bits.data_ptr<int>()[i]));
    ASSERT_EQ(static_cast<std::uint16_t>(low.data_ptr<std::int16_t>()[i]), want.low);
    ASSERT_EQ(param.data_ptr<at::BFloat16>()[i].x, want.high);
    const std::uint32_t other =
        join_fp32({want.high, static_cast<std::uint16_t>(foreign.data_ptr<std::int16_t>()[i])});
    ASSERT_EQ(static_cast<std::uint32_t>(foreign_joined.data_ptr<int>()[i]), other);
  }
}

}  // namespace
}  // namespace semitone::kernels::split_master_test
