#include "src/core/unreduced.h"

#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <memory>

namespace semitone {
namespace {

TEST(UnreducedMarks, LastUntilTheyAreCleared) {
  const at::Tensor gradient = torch::ones({2});
  EXPECT_FALSE(is_unreduced(gradient));
  const auto next = std::make_shared<const NextPass>();
  mark_unreduced(gradient, next);
  EXPECT_EQ(unreduced_mark(gradient), next);
  gradient.add_(1);
  EXPECT_TRUE(is_unreduced(gradient));
  clear_unreduced(gradient);
  EXPECT_FALSE(is_unreduced(gradient));
}

// A training with gradients that stay allocated marks them in every step.
TEST(UnreducedMarks, TakeNoMoreMemoryWithEachStep) {
  const at::Tensor gradient = torch::ones({2});
  for (int step = 0; step < 3; ++step) {
    mark_unreduced(gradient, std::make_shared<const NextPass>());
    clear_unreduced(gradient);
  }
  const auto* const meta = torch::autograd::impl::get_autograd_meta(gradient);
  ASSERT_NE(meta, nullptr);
  ASSERT_NE(meta->cpp_hooks_list_, nullptr);
  EXPECT_EQ(meta->cpp_hooks_list_->size(), 1U);
}

}  // namespace
}  // namespace semitone
