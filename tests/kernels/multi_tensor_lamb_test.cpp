#include "src/kernels/multi_tensor_lamb.h"

#include "tests/kernels/update_steps.h"
#include "tests/support/tensors.h"

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <vector>

namespace semitone::kernels::update_test {
namespace {

TEST(LambNorms, AreThoseOfTheDefinition) {
  torch::manual_seed(8);
  for (const Case& c :
       {Case{at::kFloat, at::kBFloat16, at::kBFloat16}, Case{at::kFloat, at::kHalf, at::kHalf},
        Case{at::kFloat, at::kFloat, {}}, Case{at::kDouble, at::kFloat, {}},
        Case{at::kHalf, at::kFloat, {}}, Case{at::kBFloat16, at::kBFloat16, {}, true}}) {
    // With an eps of 0, the update of memory without an element would be 0 / 0.
    const LambRule rule{.grad_scale = 0.5, .decoupled_weight_decay = 0.2, .eps = 0};
    std::vector<Update> items;
    for (const std::int64_t size : {0, 1, 5, 16, 1000, 3 * 16384 + 7})
      items.push_back(item_like(at::empty({size}), c, 2));
    std::vector<at::Tensor> want;
    for (const Update& item : items) want.push_back(ref::lamb_moments(copy_of(item), rule));
    const std::vector<at::Tensor> copies_before{items[3].copy.defined() ? items[3].copy.clone()
                                                                        : at::Tensor()};
    const auto got = multi_tensor_lamb_moments(items, std::vector<LambRule>(items.size(), rule));
    for (std::size_t i = 0; i < items.size(); ++i) {
      EXPECT_NEAR(got[i].param, want[i][0].item<double>(), 1e-12 * got[i].param) << i;
      EXPECT_NEAR(got[i].update, want[i][1].item<double>(), 1e-12 * got[i].update) << i;
    }
    if (items[3].copy.defined()) test::expect_bitwise_equal(items[3].copy, copies_before[0]);
  }
}

TEST(LambNorms, DoNotDependOnTheNumberOfThreads) {
  torch::manual_seed(9);
  const int before = at::get_num_threads();
  const Update item = item_like(at::empty({300001}), {at::kFloat, at::kFloat, {}}, 2);
  std::vector<LambNorms> norms;
  for (const int threads : {1, 2, 5}) {
    at::set_num_threads(threads);
    const Update own = copy_of(item);
    norms.push_back(multi_tensor_lamb_moments({&own, 1}, std::vector<LambRule>(1))[0]);
    EXPECT_EQ(norms.back().param, norms.front().param);
    EXPECT_EQ(norms.back().update, norms.front().update);
  }
  at::set_num_threads(before);
}

}  // namespace
}  // namespace semitone::kernels::update_test
