// Optimizer steps against their references, bit for bit.

#include "src/kernels/multi_tensor_update.h"

#include "semitone/core/dtype.h"
#include "src/kernels/flat.h"
#include "tests/kernels/update_steps.h"
#include "tests/support/errors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace semitone::kernels::update_test {
namespace {

using test::expect_error;

std::string name_of(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return std::string(c.split ? "split_" : "") + (c.bf16_state ? "bf16_state_" : "") +
         dtype_name(c.param) + "_grad_" + dtype_name(c.grad) +
         (c.copy ? "_copy_" + dtype_name(*c.copy) : "");
}

// One thread: for thousands of small tensors, waking others would take most of the time.
class MultiTensorUpdate : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    torch::manual_seed(3);
    at::set_num_threads(1);
  }
  void TearDown() override { at::set_num_threads(threads_); }

 private:
  int threads_ = at::get_num_threads();
};

TEST_P(MultiTensorUpdate, IsItsDefinitionAtEverySize) {
  // Around the widths of vectors, and the edges of chunks.
  std::vector<std::int64_t> sizes;
  for (std::int64_t size = 0; size <= 34; ++size) sizes.push_back(size);
  for (const std::int64_t size : {63, 64, 65, 127, 1000}) sizes.push_back(size);
  for (const auto edge : {kChunk, 2 * kChunk})
    for (const auto offset : {-1, 0, 1, 17}) sizes.push_back(edge + offset);
  for (const Step& step : steps_for(GetParam())) {
    std::vector<Update> items;
    for (const auto size : sizes)
      items.push_back(item_like(at::empty({size}), GetParam(), step.states));
    expect_as_defined(step, items);
  }
}

TEST_P(MultiTensorUpdate, IsItsDefinitionInEveryLayout) {
  const std::vector<at::Tensor> layouts{
      at::empty({}),
      at::empty({5, 7}).t(),
      at::empty({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast),
      at::empty({2, 3, 4, 5}).permute({3, 1, 0, 2}),
      at::empty({4, 0, 3}),
  };
  for (const Step& step : steps_for(GetParam())) {
    std::vector<Update> items;
    for (const at::Tensor& layout : layouts)
      items.push_back(item_like(layout, GetParam(), step.states));
    expect_as_defined(step, items);
  }
}

TEST_P(MultiTensorUpdate, TakesTensorsWithGapsAndOfDifferentLayouts) {
  for (const Step& step : steps_for(GetParam())) {
    SCOPED_TRACE(step.name);
    const Update dense = item_like(at::empty({6, 10}), GetParam(), step.states);
    const auto with_gaps = [](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      return at::full({6, 20}, 3, tensor.options()).slice(1, 0, 20, 2).copy_(tensor);
    };
    const auto transposed = [](const at::Tensor& tensor) {
      return tensor.defined() ? tensor.t().contiguous().t() : tensor;
    };
    const Update gaps{
        with_gaps(dense.param),
        copy_of(dense.low),
        with_gaps(dense.grad),
        copy_of(dense.copy),
        {with_gaps(dense.state[0]), copy_of(dense.state[1]), with_gaps(dense.state[2])},
        dense.seed};
    const Update mixed{
        copy_of(dense.param),
        transposed(dense.low),
        transposed(dense.grad),
        transposed(dense.copy),
        {transposed(dense.state[0]), copy_of(dense.state[1]), copy_of(dense.state[2])},
        dense.seed};
    const std::vector<Update> items{copy_of(dense), gaps, mixed};
    step.kernel(items);
    expect_equal(items[1], items[0]);
    Update got = items[2];
    got.grad = items[0].grad;
    expect_equal(got, items[0]);
  }
}

TEST_P(MultiTensorUpdate, CarriesInfAndNanWhereTheDefinitionDoes) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::int64_t size = kChunk + 21;  // the last one lies in a tail
  for (const Step& step : steps_for(GetParam())) {
    std::vector<Update> items;
    for (const float bad : {infinity, -infinity, std::numeric_limits<float>::quiet_NaN()}) {
      for (const std::int64_t component : {std::int64_t{0}, size / 2, size - 1}) {
        Update item = item_like(at::empty({size}), GetParam(), step.states);
        item.grad[component] = bad;
        items.push_back(item);
        Update other = item_like(at::empty({35}), GetParam(), step.states);
        other.param[34 * component / size] = bad;
        if (other.state[1].defined()) other.state[1][3] = bad;
        items.push_back(other);
      }
    }
    expect_as_defined(step, items);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Dtypes, MultiTensorUpdate,
    testing::Values(
        Case{at::kFloat, at::kFloat, {}}, Case{at::kFloat, at::kHalf, {}},
        Case{at::kFloat, at::kFloat, at::kBFloat16}, Case{at::kFloat, at::kBFloat16, at::kBFloat16},
        Case{at::kFloat, at::kHalf, at::kHalf}, Case{at::kFloat, at::kFloat, at::kFloat},
        Case{at::kFloat, at::kDouble, at::kDouble}, Case{at::kHalf, at::kHalf, {}},
        Case{at::kBFloat16, at::kBFloat16, {}}, Case{at::kBFloat16, at::kFloat, at::kHalf},
        Case{at::kBFloat16, at::kBFloat16, {}, true},
        Case{at::kBFloat16, at::kFloat, at::kHalf, true}, Case{at::kDouble, at::kDouble, {}},
        Case{at::kDouble, at::kFloat, at::kBFloat16}, Case{at::kFloat, at::kFloat, {}, false, true},
        Case{at::kFloat, at::kBFloat16, at::kBFloat16, false, true},
        Case{at::kBFloat16, at::kBFloat16, {}, true, true}),
    name_of);

// ---- lists ---------------------------------------------------------------------------------------

TEST(MultiTensorUpdateList, MayBeEmptyOrOfMixedDtypes) {
  for (const Step& step : all_steps()) {
    step.kernel({});
    std::vector<Update> items;
    for (const Case& c :
         {Case{at::kFloat, at::kHalf, at::kHalf}, Case{at::kDouble, at::kDouble, {}},
          Case{at::kBFloat16, at::kFloat, {}, true}})
      items.push_back(item_like(at::empty({kChunk + 3}), c, step.states));
    expect_as_defined(step, items);
  }
}

TEST(MultiTensorUpdateList, IsTheSameForAnyNumberOfThreads) {
  torch::manual_seed(5);
  const int before = at::get_num_threads();
  for (const Step& step : all_steps()) {
    std::vector<Update> one;
    for (const std::int64_t size : {10, 3 * 16384 + 5, 7, 100000})
      one.push_back(
          item_like(at::empty({size}), {at::kFloat, at::kBFloat16, at::kBFloat16}, step.states));
    std::vector<Update> three;
    for (const Update& item : one) three.push_back(copy_of(item));
    at::set_num_threads(1);
    step.kernel(one);
    at::set_num_threads(3);
    step.kernel(three);
    for (std::size_t i = 0; i < one.size(); ++i) expect_equal(three[i], one[i]);
  }
  at::set_num_threads(before);
}

TEST(MultiTensorUpdateList, BumpsTheVersionsOfWhatItWrites) {
  for (const Step& step : all_steps()) {
    const Update item =
        item_like(at::empty({5}), {at::kBFloat16, at::kFloat, at::kHalf, true}, step.states);
    std::vector<std::pair<at::Tensor, std::int64_t>> written;
    for (const at::Tensor& tensor : {item.param, item.low, item.copy, item.state[0]})
      if (tensor.defined()) written.emplace_back(tensor, tensor._version());
    if (step.name.starts_with("lamb, moments"))
      std::erase_if(written, [&](const auto& one) {
        return one.first.is_same(item.copy);  // the second pass writes it
      });
    const auto grad_version = item.grad._version();
    step.kernel({&item, 1});
    for (const auto& [tensor, version] : written) EXPECT_GT(tensor._version(), version);
    EXPECT_EQ(item.grad._version(), grad_version);
  }
}

TEST(MultiTensorUpdateErrors, NameWhatIsWrong) {
  const auto good = [] { return item_like(at::empty({4}), {at::kFloat, at::kFloat, {}}, 2); };
  const auto run = [](const Update& item) {
    return [item] { multi_tensor_update({&item, 1}, std::vector<AdamRule>(1)); };
  };
  const auto changed = [&](auto&& change) {
    Update item = good();
    change(item);
    return run(item);
  };
  expect_error(changed([](Update& item) { item.param = at::Tensor(); }),
               {"[kernels.multi_tensor_update]", "a parameter", "undefined"});
  expect_error(changed([](Update& item) { item.grad = at::Tensor(); }),
               {"a gradient", "undefined"});
  expect_error(changed([](Update& item) { item.grad = at::ones({4}, at::kInt); }), {"int32"});
  expect_error(changed([](Update& item) { item.grad = at::ones({5}); }), {"[4]", "[5]"});
  expect_error(changed([](Update& item) { item.grad = item.grad.to_sparse(); }), {"Sparse"});
  expect_error(changed([](Update& item) { item.copy = at::ones({4}, at::kLong); }),
               {"a copy", "int64"});
  expect_error(changed([](Update& item) { item.state[1] = at::ones({3}); }), {"state", "[3]"});
  expect_error(changed([](Update& item) { item.state[1] = at::ones({4}, at::kHalf); }),
               {"state in float32", "float16"});
  expect_error(changed([](Update& item) { item.state[0] = at::ones({4}, at::kMeta); }), {"meta"});
  expect_error(changed([](Update& item) { item.low = at::ones({4}, at::kShort); }),
               {"bfloat16", "float32"});
  const Update item = good();
  expect_error([&] { multi_tensor_update({&item, 1}, std::vector<AdamRule>()); },
               {"a rule for each", "0 for 1"});
}

// ---- every instruction set that this processor has -----------------------------------------------

class UpdateTargets : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(UpdateTargets, IsItsDefinition) {
  torch::manual_seed(6);
  for (const Case& c :
       {Case{at::kFloat, at::kBFloat16, at::kBFloat16}, Case{at::kHalf, at::kHalf, {}},
        Case{at::kBFloat16, at::kFloat, at::kHalf, true}}) {
    for (const Step& step : all_steps()) {
      std::vector<Update> items;
      for (const std::int64_t size : {1, 3, 4, 7, 8, 15, 16, 33, 1000})
        items.push_back(item_like(at::empty({size}), c, step.states));
      items.back().grad[500] = std::numeric_limits<float>::quiet_NaN();
      expect_as_defined(step, items);
    }
  }
}

static_assert(flush_subnormal(0x80000000) == 0);
static_assert(flush_subnormal(0x007FFFFF) == 0);
static_assert(flush_subnormal(0x807FFFFF) == 0);
static_assert(flush_subnormal(0x00800000) == 0x00800000);
static_assert(flush_subnormal(0x80800000) == 0x80800000);
static_assert(flush_subnormal(0xFF800000) == 0xFF800000);
static_assert(flush_subnormal(0x7FC00001) == 0x7FC00001);

// State around the smallest normal number, with gradients that leave it there.
Update idle_item(std::int64_t size, const Case& c, std::size_t states) {
  constexpr float kSmallest = std::numeric_limits<float>::min();
  const at::Tensor around = torch::tensor(
      {0.0F, std::numeric_limits<float>::denorm_min(), 1e-42F, 5e-39F,
       std::nextafter(kSmallest, 0.0F), kSmallest, std::nextafter(kSmallest, 1.0F),
       1.1F * kSmallest, 1.3F * kSmallest, 1e-37F, 1e-30F, 1.0F,
       std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()});
  const at::Tensor tiled = around.repeat({size / around.numel() + 1}).slice(0, 0, size);
  const at::Tensor sign = torch::randint(0, 2, {size}).mul(2).sub(1);
  Update item = item_like(at::empty({size}), c, states);
  item.param.zero_();
  if (item.low.defined()) item.low.zero_();
  item.grad.copy_(torch::tensor({0.0F, 1e-20F, 1e-39F}).index({torch::randint(0, 3, {size})}));
  for (std::size_t k = 0; k < states; ++k) item.state[k].copy_(k == 0 ? tiled * sign : tiled);
  return item;
}

bool has_subnormal(const at::Tensor& tensor) {
  const at::Tensor magnitude = tensor.to(at::kDouble).abs();
  return magnitude.gt(0)
      .logical_and(magnitude.lt(std::numeric_limits<float>::min()))
      .any()
      .item<bool>();
}

TEST_P(UpdateTargets, LeavesNoSubnormalState) {
  torch::manual_seed(7);
  for (const Case& c :
       {Case{at::kFloat, at::kFloat, {}}, Case{at::kFloat, at::kBFloat16, at::kBFloat16},
        Case{at::kBFloat16, at::kBFloat16, {}, true}, Case{at::kFloat, at::kFloat, {}, false, true},
        Case{at::kHalf, at::kFloat, {}}}) {
    for (const Step& step : steps_for(c)) {
      if (!step.writes_state) continue;  // writes no state
      SCOPED_TRACE(step.name);
      const std::vector<Update> items{idle_item(1, c, step.states), idle_item(13, c, step.states),
                                      idle_item(1000, c, step.states)};
      expect_as_defined(step, items);
      const Update got = copy_of(items.back());
      step.kernel({&got, 1});
      for (std::size_t k = 0; k < step.states; ++k) {
        SCOPED_TRACE(c10::str("state ", k));
        EXPECT_TRUE(has_subnormal(items.back().state[k]));
        EXPECT_FALSE(has_subnormal(got.state[k]));
        if (step.name == "momentum, first step") continue;  // takes the gradient for it
        // Normal numbers, infinities and NaNs are not flushed.
        const at::Tensor before = items.back().state[k].to(at::kFloat);
        const at::Tensor large = before.abs().ge(1e-30).logical_or(before.isnan());
        EXPECT_TRUE(got.state[k].ne(0).masked_select(large).all().item<bool>());
      }
    }
  }
}

// In slices of tensors, kernels may start at any element.
TEST_P(UpdateTargets, TakesViewsThatBeginAnywhere) {
  torch::manual_seed(8);
  const auto view_of = [](const at::Tensor& tensor, std::int64_t offset) {
    if (!tensor.defined()) return tensor;
    const at::Tensor whole = at::full({tensor.numel() + offset}, 5, tensor.options());
    return whole.slice(0, offset).copy_(tensor);
  };
  for (const Case& c : {Case{at::kFloat, at::kBFloat16, at::kBFloat16},
                        Case{at::kBFloat16, at::kFloat, at::kHalf, true}}) {
    for (const Step& step : all_steps()) {
      for (const std::int64_t offset : {1, 2, 3, 5}) {
        const Update want = item_like(at::empty({203}), c, step.states);
        const Update got{view_of(want.param, offset),
                         view_of(want.low, 2 * offset + 1),
                         view_of(want.grad, offset + 1),
                         view_of(want.copy, 1),
                         {view_of(want.state[0], offset), view_of(want.state[1], 2),
                          view_of(want.state[2], offset)},
                         want.seed};
        SCOPED_TRACE(c10::str(step.name, ", offset ", offset));
        step.kernel({&got, 1});
        step.definition(want);
        expect_equal(got, want);
      }
    }
  }
}

TEST_P(UpdateTargets, WritesNothingBehindTheEnd) {
  for (const Step& step : all_steps()) {
    for (std::int64_t size = 0; size < 36; ++size) {
      const Update whole = item_like(at::empty({size + 1}),
                                     {at::kBFloat16, at::kFloat, at::kHalf, true}, step.states);
      const Update before = copy_of(whole);
      const auto part = [&](const at::Tensor& tensor) {
        return tensor.defined() ? tensor.slice(0, 0, size) : tensor;
      };
      const Update item{part(whole.param),
                        part(whole.low),
                        part(whole.grad),
                        part(whole.copy),
                        {part(whole.state[0]), part(whole.state[1]), part(whole.state[2])}};
      step.kernel({&item, 1});
      const auto last = [&](const at::Tensor& tensor) {
        return tensor.defined() ? tensor.slice(0, size) : tensor;
      };
      const auto tail = [&](const Update& one) {
        return Update{last(one.param),
                      last(one.low),
                      last(one.grad),
                      last(one.copy),
                      {last(one.state[0]), last(one.state[1]), last(one.state[2])}};
      };
      expect_equal(tail(whole), tail(before));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, UpdateTargets,
                         testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) {
                           return std::string(hwy::TargetName(target.param));
                         });

}  // namespace
}  // namespace semitone::kernels::update_test
