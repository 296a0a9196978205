#include "semitone/autocast/cast_tree.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

namespace semitone::amp::cast_tree_test {
namespace {

constexpr auto kFp32 = torch::kFloat;
constexpr auto kFp16 = torch::kHalf;
constexpr auto kBf16 = torch::kBFloat16;

TEST(CastFloating, ConvertsFp32AndThe16BitDtypes) {
  for (const auto from : {kFp32, kFp16, kBf16}) {
    for (const auto to : {kFp32, kFp16, kBf16})
      EXPECT_EQ(cast_floating(torch::ones({2}, from), to).scalar_type(), to);
  }
}

TEST(CastFloating, LeavesTheRestAlone) {
  for (const auto dtype : {torch::kLong, torch::kInt, torch::kBool, torch::kByte,
                           torch::kComplexFloat, torch::kDouble})
    EXPECT_EQ(cast_floating(torch::ones({2}, dtype), kFp16).scalar_type(), dtype);
  EXPECT_FALSE(cast_floating(at::Tensor(), kFp16).defined());
}

TEST(CastFloating, TakesFp64WhereAskedTo) {
  EXPECT_EQ(cast_floating(torch::ones({2}, torch::kDouble), kFp16, true).scalar_type(), kFp16);
  EXPECT_EQ(cast_floating(torch::ones({2}, torch::kLong), kFp16, true).scalar_type(), torch::kLong);
}

TEST(CastFloating, ReturnsTheSameTensorIfNothingHasToBeDone) {
  const auto tensor = torch::ones({2});
  EXPECT_TRUE(cast_floating(tensor, kFp32).is_same(tensor));
}

TEST(CastFloating, IsRecordedByAutograd) {
  const auto leaf = torch::ones({2}).requires_grad_();
  cast_floating(leaf, kFp16).sum().backward();
  EXPECT_EQ(leaf.grad().scalar_type(), kFp32);
}

TEST(CastFloating, TakesIValuesToo) {
  const c10::IValue value = c10::ivalue::Tuple::create({torch::ones({2}), 5});
  EXPECT_EQ(cast_floating(value, kBf16).toTuple()->elements()[0].toTensor().scalar_type(), kBf16);
  const c10::IValue wide(torch::ones({2}, torch::kDouble));
  EXPECT_EQ(cast_floating(wide, kFp16).toTensor().scalar_type(), torch::kDouble);
  EXPECT_EQ(cast_floating(wide, kFp16, true).toTensor().scalar_type(), kFp16);
}

}  // namespace
}  // namespace semitone::amp::cast_tree_test
