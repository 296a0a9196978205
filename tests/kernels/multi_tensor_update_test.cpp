// Optimizer steps against their references, bit for bit.

#include "src/kernels/multi_tensor_update.h"

#include "semitone/core/dtype.h"
#include "src/kernels/flat.h"
#include "src/kernels/rounding.h"
#include "src/kernels/rule_numbers.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace semitone::kernels::multi_tensor_update_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_error;

// ---- the cases ----------------------------------------------------------------------------------

// A rule with its kernel, its reference and the number of its state tensors.
struct Step {
  std::string name;
  std::size_t states;
  std::function<void(std::span<const Update>)> kernel;
  std::function<void(const Update&)> definition;
  bool takes_bf16_state = false;
};

template <typename Rule>
Step step(const std::string& name, std::size_t states, const Rule& rule,
          void (*kernel)(std::span<const Update>, std::span<const Rule>),
          void (*definition)(const Update&, const Rule&)) {
  return {
      name, states,
      [=](std::span<const Update> items) { kernel(items, std::vector<Rule>(items.size(), rule)); },
      [=](const Update& item) { definition(item, rule); },
      std::is_same_v<Rule, AdamRule> || (std::is_same_v<Rule, SgdRule> && states > 0)};
}

// One of LAMB's passes.
Step lamb_step(const std::string& name, const LambRule& rule, bool moments) {
  if (!moments) return step<LambRule>(name, 2, rule, multi_tensor_lamb_apply, ref::lamb_apply);
  return {name, 2,
          [=](std::span<const Update> items) {
            multi_tensor_lamb_moments(items, std::vector<LambRule>(items.size(), rule));
          },
          [=](const Update& item) { ref::lamb_moments(item, rule); }, false};
}

// Numbers that are all different, so that a swap is detected; every branch of every rule.
std::vector<Step> all_steps() {
  const auto adam = [](const std::string& name, std::size_t states, const AdamRule& rule) {
    return step<AdamRule>(name, states, rule, multi_tensor_adam, ref::adam);
  };
  const auto sgd = [](const std::string& name, std::size_t states, const SgdRule& rule) {
    return step<SgdRule>(name, states, rule, multi_tensor_sgd, ref::sgd);
  };
  const auto novograd = [](const std::string& name, const NovoGradRule& rule) {
    return step<NovoGradRule>(name, 1, rule, multi_tensor_novograd, ref::novograd);
  };
  const auto adagrad = [](const std::string& name, const AdagradRule& rule) {
    return step<AdagradRule>(name, 1, rule, multi_tensor_adagrad, ref::adagrad);
  };
  AdamRule l2{
      .grad_scale = -0.37, .weight_decay = 0.11, .beta1 = 0.83, .beta2 = 0.957, .eps = 1e-3};
  l2.step_size = 0.0123;
  l2.bias_correction2_sqrt = 0.29;
  AdamRule decoupled = l2;
  decoupled.weight_decay = 0;
  decoupled.decay_factor = 0.987;
  SgdRule momentum{.grad_scale = 0.71,
                   .weight_decay = 0.03,
                   .momentum = 0.9,
                   .one_minus_dampening = 0.8,
                   .lr = 0.13};
  SgdRule first = momentum;
  first.first = true;
  SgdRule nesterov{.momentum = 0.7, .lr = 0.21, .nesterov = true};
  SgdRule decoupled_sgd{
      .trust_ratio = 0.31, .momentum = 0.6, .decoupled_weight_decay = 0.07, .lr = 0.19};
  LambRule lamb_l2{
      .grad_scale = 0.41, .weight_decay = 0.13, .beta1 = 0.83, .beta3 = 0.21, .beta2 = 0.957};
  lamb_l2.eps = 1e-3;
  lamb_l2.inv_bias_correction1 = 2.3;
  lamb_l2.inv_bias_correction2 = 7.1;
  lamb_l2.step_size = 0.017;
  LambRule lamb = lamb_l2;
  lamb.weight_decay = 0;
  lamb.decoupled_weight_decay = 0.07;
  return {
      adam("adam", 2, l2),
      adam("adamw", 2, decoupled),
      adam("amsgrad", 3, decoupled),
      sgd("sgd", 0, {.weight_decay = 0.03, .lr = 0.13}),
      sgd("momentum", 1, momentum),
      sgd("momentum, first step", 1, first),
      sgd("nesterov", 1, nesterov),
      sgd("decoupled weight decay, trust ratio", 1, decoupled_sgd),
      novograd("novograd, decay in the update", {.grad_scale = 0.3,
                                                 .beta3 = 0.2,
                                                 .correction = 1.7,
                                                 .decoupled_weight_decay = 0.09,
                                                 .lr = 0.01}),
      novograd(
          "novograd, decay in the moment",
          {.grad_scale = 1.3, .weight_decay = 0.09, .beta1 = 0.8, .correction = 1.7, .lr = 0.01}),
      adagrad("adagrad", {.grad_scale = 0.7, .weight_decay = 0.09, .eps = 1e-3, .lr = 0.017}),
      adagrad("adagrad, decoupled weight decay",
              {.decoupled_weight_decay = 0.09, .eps = 1e-3, .lr = 0.017}),
      lamb_step("lamb, moments", lamb, true),
      lamb_step("lamb, moments, L2", lamb_l2, true),
      lamb_step("lamb, parameters", lamb, false),
      lamb_step("lamb, parameters, L2", lamb_l2, false),
  };
}

struct Case {
  c10::ScalarType param;
  c10::ScalarType grad;
  std::optional<c10::ScalarType> copy;
  bool split = false;
  bool bf16_state = false;
};

std::string name_of(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return std::string(c.split ? "split_" : "") + (c.bf16_state ? "bf16_state_" : "") +
         dtype_name(c.param) + "_grad_" + dtype_name(c.grad) +
         (c.copy ? "_copy_" + dtype_name(*c.copy) : "");
}

// Values over many binades, so that sums are rounded.
at::Tensor values(at::IntArrayRef shape) {
  const auto magnitude = torch::pow(2, torch::randint(-12, 4, shape).to(torch::kFloat));
  return torch::randn(shape) * magnitude;
}

// The same elements in a layout's strides.
at::Tensor in_layout_of(const at::Tensor& layout, const at::Tensor& value, c10::ScalarType dtype) {
  at::Tensor tensor =
      at::empty_strided(layout.sizes(), layout.strides(), layout.options().dtype(dtype));
  return tensor.copy_(value);
}

// An item with random values in a layout.
Update item_like(const at::Tensor& layout, const Case& c, std::size_t states) {
  const auto wide = c.param == at::kDouble ? at::kDouble : at::kFloat;
  Update item;
  item.seed = 0x89ABCDEF;
  item.param = in_layout_of(layout, values(layout.sizes()), c.param);
  item.grad = in_layout_of(layout, values(layout.sizes()), c.grad);
  if (c.copy) item.copy = in_layout_of(layout, at::full(layout.sizes(), 7), *c.copy);
  if (c.split) {
    item.low = in_layout_of(layout, at::zeros(layout.sizes()), at::kShort);
    split_master(values(layout.sizes()), item.param, item.low);
  }
  for (std::size_t k = 0; k < states; ++k)  // some of them are under a root
    item.state[k] =
        in_layout_of(layout, k == 0 ? values(layout.sizes()) : values(layout.sizes()).abs(),
                     c.bf16_state ? at::kBFloat16 : wide);
  return item;
}

at::Tensor copy_of(const at::Tensor& tensor) {
  return tensor.defined() ? in_layout_of(tensor, tensor, tensor.scalar_type()) : tensor;
}

Update copy_of(const Update& item) {
  return {copy_of(item.param),
          copy_of(item.low),
          copy_of(item.grad),
          copy_of(item.copy),
          {copy_of(item.state[0]), copy_of(item.state[1]), copy_of(item.state[2])},
          item.seed};
}

void expect_equal(const Update& got, const Update& want) {
  const auto same = [](const at::Tensor& g, const at::Tensor& w, const char* what) {
    SCOPED_TRACE(what);
    if (w.defined() || g.defined()) expect_bitwise_equal(g, w);
  };
  same(got.param, want.param, "parameter");
  same(got.low, want.low, "lower halves");
  same(got.grad, want.grad, "gradient");
  same(got.copy, want.copy, "copy");
  for (std::size_t k = 0; k < 3; ++k) same(got.state[k], want.state[k], "state");
}

void expect_as_defined(const Step& step, const std::vector<Update>& items) {
  std::vector<Update> got;
  for (const Update& item : items) got.push_back(copy_of(item));
  step.kernel(got);
  for (std::size_t i = 0; i < items.size(); ++i) {
    SCOPED_TRACE(step.name + ", item " + std::to_string(i) +
                 c10::str(" of ", items[i].param.sizes()));
    const Update want = copy_of(items[i]);
    step.definition(want);
    expect_equal(got[i], want);
  }
}

// The items for the case's state.
std::vector<Step> steps_for(const Case& c) {
  std::vector<Step> steps = all_steps();
  if (c.bf16_state) std::erase_if(steps, [](const Step& step) { return !step.takes_bf16_state; });
  return steps;
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

// ---- capturable steps ---------------------------------------------------------------------------

// Rules of two steps, for this many parameters each.
std::vector<std::array<Rules, 2>> captured_rules(std::size_t count) {
  const AdamRule adam{
      .grad_scale = 0.37, .decay_factor = 0.987, .beta1 = 0.83, .step_size = 0.0123};
  AdamRule later_adam = adam;
  later_adam.step_size = 0.0077;
  later_adam.bias_correction2_sqrt = 0.61;
  const SgdRule first{.momentum = 0.9, .one_minus_dampening = 0.8, .lr = 0.13, .first = true};
  SgdRule later = first;
  later.first = false;
  later.lr = 0.11;
  return {{std::vector<AdamRule>(count, adam), std::vector<AdamRule>(count, later_adam)},
          {std::vector<SgdRule>(count, first), std::vector<SgdRule>(count, later)},
          {std::vector<AdagradRule>(count, AdagradRule{.lr = 0.3}),
           std::vector<AdagradRule>(count, AdagradRule{.weight_decay = 0.1, .lr = 0.2})}};
}

// With several dtypes, so large that a list takes several launches, and with two that share memory.
std::vector<Update> captured_items() {
  std::vector<Update> items;
  for (int i = 0; i < 70; ++i)
    items.push_back(item_like(at::empty({i % 7, 5}), {at::kFloat, at::kHalf, at::kHalf}, 2));
  items.push_back(item_like(at::empty({40'000}), {at::kBFloat16, at::kBFloat16, {}, true}, 2));
  items.push_back(copy_of(items.back()));
  items.back().param = items[items.size() - 2].param;
  items.back().low = items[items.size() - 2].low;
  return items;
}

std::vector<Update> copy_of(const std::vector<Update>& items) {
  std::vector<Update> copies;
  for (const Update& item : items) copies.push_back(copy_of(item));
  copies.back().param = copies[copies.size() - 2].param;
  copies.back().low = copies[copies.size() - 2].low;
  return copies;
}

TEST(CapturableUpdate, TakesTheStepsOfTheRulesThatWereSent) {
  torch::manual_seed(5);
  const std::vector<Update> items = captured_items();
  for (const auto& rules : captured_rules(items.size())) {
    const std::vector<Update> got = copy_of(items);
    const std::vector<Update> want = copy_of(items);
    CapturableUpdate capturable(at::kCPU);
    for (const Rules& of_step : rules) {
      capturable.send(of_step);
      capturable.run(got, at::zeros({}));
      multi_tensor_update(want, of_step);
    }
    capturable.run(got, {});
    multi_tensor_update(want, rules[1]);
    for (std::size_t i = 0; i < items.size(); ++i) {
      SCOPED_TRACE(c10::str("kind ", rules[0].index(), ", item ", i));
      expect_equal(got[i], want[i]);
    }
  }
}

TEST(CapturableUpdate, ChangesNothingWhereFoundInfIsSet) {
  torch::manual_seed(5);
  const std::vector<Update> items = captured_items();
  for (const auto& rules : captured_rules(items.size())) {
    for (const float found_inf : {1.0F, std::numeric_limits<float>::quiet_NaN()}) {
      const std::vector<Update> got = copy_of(items);
      CapturableUpdate capturable(at::kCPU);
      capturable.send(rules[1]);
      capturable.run(got, at::full({}, found_inf));
      for (std::size_t i = 0; i < items.size(); ++i) expect_equal(got[i], items[i]);
    }
  }
}

TEST(CapturableUpdate, NamesWhatItCannotCapture) {
  const std::vector<AdamRule> one(1);
  const auto run = [&](const Case& c, const at::Tensor& layout, const at::Tensor& found_inf) {
    return [=] {
      CapturableUpdate capturable(at::kCPU);
      capturable.send(one);
      capturable.run(std::vector<Update>{item_like(layout, c, 2)}, found_inf);
    };
  };
  expect_error(run({at::kDouble, at::kDouble, {}}, at::empty({3}), {}), {"float64", "16-bit"});
  expect_error(run({at::kFloat, at::kFloat, {}}, at::empty({6}).slice(0, 0, 6, 2), {}),
               {"without gaps"});
  expect_error(run({at::kFloat, at::kFloat, {}}, at::empty({3}), at::zeros({2})), {"found_inf"});
  const auto others = [&](const Rules& rules) {
    return [=] {
      CapturableUpdate capturable(at::kCPU);
      capturable.send(one);
      capturable.send(rules);
    };
  };
  expect_error(others(std::vector<AdamRule>(2)), {"as many rules as before"});
  expect_error(others(std::vector<AdagradRule>(1)), {"of the same kind"});
  expect_error([] { CapturableUpdate(at::kCPU).run({}, {}); }, {"rules that were sent"});
}

// ---- formulas -----------------------------------------------------------------------------------

// One number computed by hand, in fp64: references and kernels could be wrong together.
TEST(AdamDefinition, IsTheFormula) {
  const AdamRule rule{.grad_scale = 0.5,
                      .weight_decay = 0.1,
                      .decay_factor = 0.9,
                      .beta1 = 0.8,
                      .beta2 = 0.9,
                      .eps = 0.01,
                      .step_size = 0.3,
                      .bias_correction2_sqrt = 0.7};
  const double p = 1.5, m = 0.25, v = 0.5, largest = 0.75;
  const double g = 2.0 * 0.5 + 0.1 * p;
  const double new_m = 0.8 * m + 0.2 * g;
  const double new_v = 0.9 * v + 0.1 * g * g;
  const double new_largest = std::max(largest, new_v);
  const double new_p = 0.9 * p - 0.3 * new_m / (std::sqrt(new_largest) / 0.7 + 0.01);
  const auto of = [](double value) { return at::full({1}, value, at::kDouble); };
  const Update item{of(p), {}, of(2), {}, {of(m), of(v), of(largest)}};
  ref::adam(item, rule);
  EXPECT_DOUBLE_EQ(item.state[0].item<double>(), new_m);
  EXPECT_DOUBLE_EQ(item.state[1].item<double>(), new_v);
  EXPECT_DOUBLE_EQ(item.state[2].item<double>(), new_largest);
  EXPECT_DOUBLE_EQ(item.param.item<double>(), new_p);
}

TEST(SgdDefinition, IsTheFormula) {
  const SgdRule rule{.grad_scale = 0.5,
                     .weight_decay = 0.1,
                     .trust_ratio = 0.6,
                     .momentum = 0.9,
                     .one_minus_dampening = 0.7,
                     .decoupled_weight_decay = 0.2,
                     .lr = 0.3,
                     .nesterov = true};
  const double p = 1.5, buffer = 0.25;
  const double g = (2.0 * 0.5 + 0.1 * p) * 0.6;
  const double new_buffer = 0.9 * buffer + 0.7 * g;
  const double new_p = p - 0.3 * (g + 0.9 * new_buffer + 0.2 * p);
  const auto of = [](double value) { return at::full({1}, value, at::kDouble); };
  const Update item{of(p), {}, of(2), {}, {of(buffer), {}, {}}};
  ref::sgd(item, rule);
  EXPECT_DOUBLE_EQ(item.state[0].item<double>(), new_buffer);
  EXPECT_DOUBLE_EQ(item.param.item<double>(), new_p);
}

TEST(LambDefinition, IsTheFormula) {
  LambRule rule{.grad_scale = 0.5,
                .weight_decay = 0.1,
                .decoupled_weight_decay = 0.2,
                .beta1 = 0.8,
                .beta3 = 0.3,
                .beta2 = 0.9,
                .eps = 0.01,
                .inv_bias_correction1 = 3,
                .inv_bias_correction2 = 5,
                .step_size = 0.7};
  const double p = -1.5, m = 0.25, v = 0.5;
  const double g = 2.0 * 0.5 + 0.1 * p;
  const double new_m = 0.8 * m + 0.3 * g;
  const double new_v = 0.9 * v + 0.1 * g * g;
  const double u = new_m * 3 / (std::sqrt(new_v * 5) + 0.01) + 0.2 * p;
  const auto of = [](double value) { return at::full({1}, value, at::kDouble); };
  const Update item{of(p), {}, of(2), {}, {of(m), of(v), {}}};
  const at::Tensor norms = ref::lamb_moments(item, rule);
  EXPECT_DOUBLE_EQ(norms[0].item<double>(), 1.5);
  EXPECT_DOUBLE_EQ(norms[1].item<double>(), std::abs(u));
  EXPECT_DOUBLE_EQ(item.param.item<double>(), p);
  ref::lamb_apply(item, rule);
  EXPECT_DOUBLE_EQ(item.state[0].item<double>(), new_m);
  EXPECT_DOUBLE_EQ(item.state[1].item<double>(), new_v);
  EXPECT_DOUBLE_EQ(item.param.item<double>(), p - 0.7 * u);
}

TEST(LambNorms, AreThoseOfTheDefinition) {
  torch::manual_seed(8);
  LambRule rule{.grad_scale = 0.5, .decoupled_weight_decay = 0.2};
  for (const Case& c :
       {Case{at::kFloat, at::kBFloat16, at::kBFloat16}, Case{at::kDouble, at::kFloat, {}},
        Case{at::kBFloat16, at::kBFloat16, {}, true}}) {
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
    if (items[3].copy.defined()) expect_bitwise_equal(items[3].copy, copies_before[0]);
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

TEST(NovoGradDefinition, IsTheFormula) {
  const NovoGradRule rule{.grad_scale = 0.5,
                          .weight_decay = 0.1,
                          .beta1 = 0.8,
                          .beta3 = 0.3,
                          .correction = 3,
                          .decoupled_weight_decay = 0.2,
                          .lr = 0.7};
  const double p = -1.5, m = 0.25;
  const double new_m = 0.8 * m + 0.3 * (2.0 * 0.5 + 0.1 * p);
  const auto of = [](double value) { return at::full({1}, value, at::kDouble); };
  const Update item{of(p), {}, of(2), {}, {of(m), {}, {}}};
  ref::novograd(item, rule);
  EXPECT_DOUBLE_EQ(item.state[0].item<double>(), new_m);
  EXPECT_DOUBLE_EQ(item.param.item<double>(), p - 0.7 * (new_m * 3 + 0.2 * p));
}

TEST(AdagradDefinition, IsTheFormula) {
  const AdagradRule rule{.grad_scale = 0.5,
                         .weight_decay = 0.1,
                         .decoupled_weight_decay = 0.2,
                         .eps = 0.01,
                         .lr = 0.7};
  const double p = -1.5, h = 0.25;
  const double g = 2.0 * 0.5 + 0.1 * p;
  const double new_h = h + g * g;
  const auto of = [](double value) { return at::full({1}, value, at::kDouble); };
  const Update item{of(p), {}, of(2), {}, {of(h), {}, {}}};
  ref::adagrad(item, rule);
  EXPECT_DOUBLE_EQ(item.state[0].item<double>(), new_h);
  EXPECT_DOUBLE_EQ(item.param.item<double>(), p - 0.7 * (g / (std::sqrt(new_h) + 0.01) + 0.2 * p));
}

// Their smallest normal number is 2^-1022: 1e-310 becomes 0, 1e-300 does not.
TEST(StateDefinitions, FlushSubnormalNumbersOfFp64) {
  for (const Step& step : all_steps()) {
    if (step.states == 0 || step.name.starts_with("lamb, parameters")) continue;
    SCOPED_TRACE(step.name);
    Update item;
    item.param = at::zeros({2}, at::kDouble);
    item.grad = at::zeros({2}, at::kDouble);
    for (std::size_t k = 0; k < step.states; ++k)
      item.state[k] = torch::tensor({1e-310, 1e-300}, at::kDouble);
    step.definition(item);
    for (std::size_t k = 0; k < step.states; ++k) {
      EXPECT_EQ(item.state[k][0].item<double>(), 0);
      EXPECT_EQ(item.state[k][1].item<double>() == 0, step.name == "momentum, first step");
    }
  }
}

// ---- split masters ------------------------------------------------------------------------------

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

// ---- lists --------------------------------------------------------------------------------------

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
    return [item] { multi_tensor_adam({&item, 1}, std::vector<AdamRule>(1)); };
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
  expect_error([&] { multi_tensor_adam({&item, 1}, {}); }, {"a rule for each", "0 for 1"});
}

// ---- every instruction set that this processor has ----------------------------------------------

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
      if (step.name.starts_with("lamb, parameters")) continue;  // writes no state
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
}  // namespace semitone::kernels::multi_tensor_update_test
