// Steps whose rules are read from the device's memory.

#include "src/kernels/update_on_device.h"

#include "src/kernels/multi_tensor_lamb.h"
#include "tests/kernels/update_steps.h"
#include "tests/support/errors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <vector>

namespace semitone::kernels::update_test {
namespace {

using test::expect_error;

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

std::vector<Update> copies_of(const std::vector<Update>& items) {
  std::vector<Update> copies;
  for (const Update& item : items) copies.push_back(copy_of(item));
  copies.back().param = copies[copies.size() - 2].param;
  copies.back().low = copies[copies.size() - 2].low;
  return copies;
}

TEST(UpdateOnDevice, TakesTheStepsOfTheRulesThatWereSent) {
  torch::manual_seed(5);
  const std::vector<Update> items = captured_items();
  for (const auto& rules : captured_rules(items.size())) {
    const std::vector<Update> got = copies_of(items);
    const std::vector<Update> want = copies_of(items);
    UpdateOnDevice capturable(at::kCPU);
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

TEST(UpdateOnDevice, ChoosesBetweenRulesThatWereSent) {
  torch::manual_seed(5);
  const std::vector<Update> items = captured_items();
  for (const auto& rules : captured_rules(items.size())) {
    const std::vector<Update> got = copies_of(items);
    const std::vector<Update> want = copies_of(items);
    std::vector<double> inputs(items.size(), 3);
    inputs.insert(inputs.end(), items.size(), 4);
    UpdateOnDevice update(at::kCPU);
    for (const unsigned chosen : {0U, 1U, 1U, 0U}) {
      update.send_either(rules, inputs);
      update.choose(at::full({1}, static_cast<float>(chosen)));
      EXPECT_TRUE(update.inputs().eq(chosen == 0 ? 3 : 4).all().item<bool>());
      update.run(got, at::zeros({}));
      multi_tensor_update(want, rules[chosen]);
    }
    for (std::size_t i = 0; i < items.size(); ++i) {
      SCOPED_TRACE(c10::str("kind ", rules[0].index(), ", item ", i));
      expect_equal(got[i], want[i]);
    }
  }
  UpdateOnDevice update(at::kCPU);
  expect_error([&] { update.send_either({std::vector<AdamRule>(1), std::vector<SgdRule>(1)}); },
               {"two sets of rules of the same kind"});
}

TEST(UpdateOnDevice, ChangesNothingWhereFoundInfIsSet) {
  torch::manual_seed(5);
  const std::vector<Update> items = captured_items();
  for (const auto& rules : captured_rules(items.size())) {
    for (const float found_inf : {1.0F, std::numeric_limits<float>::quiet_NaN()}) {
      const std::vector<Update> got = copies_of(items);
      UpdateOnDevice capturable(at::kCPU);
      capturable.send(rules[1]);
      capturable.run(got, at::full({}, found_inf));
      for (std::size_t i = 0; i < items.size(); ++i) expect_equal(got[i], items[i]);
    }
  }
}

// Lists of numbers that differ from item to item.
ComputedNumbers computed_numbers(std::size_t count) {
  const auto list = [&](double first) {
    return at::arange(static_cast<std::int64_t>(count), at::kDouble).mul(0.01).add(first);
  };
  return {list(0.3), list(0.1), list(0.7), list(1.1), list(0.02)};
}

template <typename Rule>
std::vector<Rule> with_computed(std::vector<Rule> rules) {
  for (std::size_t i = 0; i < rules.size(); ++i) {
    const double more = 0.01 * static_cast<double>(i);
    rules[i].grad_scale = more + 0.3;
    if constexpr (requires { rules[i].trust_ratio; }) {
      rules[i].weight_decay = more + 0.1;
      rules[i].trust_ratio = more + 0.7;
    }
    if constexpr (requires { rules[i].correction; }) rules[i].correction = more + 1.1;
    if constexpr (requires { rules[i].step_size; }) rules[i].step_size = more + 0.02;
  }
  return rules;
}

// Those that no kernel supports stand between the others.
std::vector<Update> mixed_items() {
  std::vector<Update> items = captured_items();
  items.insert(items.begin() + 3, item_like(at::empty({7}), {at::kDouble, at::kDouble, {}}, 2));
  items.insert(items.begin() + 5,
               item_like(at::empty({12}).slice(0, 0, 12, 2), {at::kFloat, at::kFloat, {}}, 2));
  items.insert(items.begin() + 6, item_like(at::empty({}), {at::kFloat, at::kHalf, {}}, 2));
  return items;
}

TEST(UpdateOnDevice, TakesNumbersThatTheDeviceHasComputed) {
  torch::manual_seed(5);
  const std::vector<Update> items = mixed_items();
  const auto check = [&]<typename Rule>(Rule rule) {
    SCOPED_TRACE(Rule::kName);
    const std::vector<Rule> rules(items.size(), rule);
    const std::vector<Update> got = copies_of(items);
    const std::vector<Update> want = copies_of(items);
    UpdateOnDevice update(at::kCPU);
    update.send(rules, std::vector<double>(2 * items.size(), 0.5));
    update.set(computed_numbers(items.size()));
    update.run(got, at::zeros({1}));
    multi_tensor_update(want, with_computed(rules));
    update.send(rules, std::vector<double>(2 * items.size(), 0.5));  // replaces them again
    update.run(got, {});
    multi_tensor_update(want, rules);
    for (std::size_t i = 0; i < items.size(); ++i) {
      SCOPED_TRACE(i);
      expect_equal(got[i], want[i]);
    }
  };
  check(SgdRule{.momentum = 0.9});
  check(LambRule{.decoupled_weight_decay = 0.2});
  check(NovoGradRule{.weight_decay = 0.2});
  UpdateOnDevice adam(at::kCPU);
  adam.send(std::vector<AdamRule>(1));
  expect_error([&] { adam.set(computed_numbers(1)); }, {"norms", "adam"});
}

TEST(UpdateOnDevice, MeasuresForLamb) {
  torch::manual_seed(5);
  const std::vector<Update> items = mixed_items();
  const std::vector<LambRule> rules(items.size(), LambRule{.decoupled_weight_decay = 0.1});
  const std::vector<Update> got = copies_of(items);
  const std::vector<Update> want = copies_of(items);
  UpdateOnDevice update(at::kCPU);
  update.send(rules);
  const at::Tensor norms = update.lamb_moments(got, {});
  const std::vector<LambNorms> expected = multi_tensor_lamb_moments(want, rules);
  ASSERT_EQ(norms.sizes(), (std::vector<std::int64_t>{std::ssize(items), 2}));
  for (std::size_t i = 0; i < items.size(); ++i) {
    SCOPED_TRACE(i);
    const auto row = static_cast<std::int64_t>(i);
    EXPECT_EQ(norms[row][0].item<double>(), expected[i].param);
    EXPECT_EQ(norms[row][1].item<double>(), expected[i].update);
    expect_equal(got[i], want[i]);
  }
  update.lamb_moments(got, at::ones({}));
  for (std::size_t i = 0; i < items.size(); ++i) expect_equal(got[i], want[i]);
}

TEST(UpdateOnDevice, NamesWhatItCannotCapture) {
  const std::vector<AdamRule> one(1);
  const auto run = [&](const Case& c, const at::Tensor& layout, const at::Tensor& found_inf) {
    return [=] {
      UpdateOnDevice capturable(at::kCPU);
      capturable.send(one);
      const std::vector<Update> items{item_like(layout, c, 2)};
      capturable.require_capturable(items);
      capturable.run(items, found_inf);
    };
  };
  expect_error(run({at::kDouble, at::kDouble, {}}, at::empty({3}), {}), {"float64", "16-bit"});
  expect_error(run({at::kFloat, at::kFloat, {}}, at::empty({6}).slice(0, 0, 6, 2), {}),
               {"without gaps"});
  expect_error(run({at::kFloat, at::kFloat, {}}, at::empty({3}), at::zeros({2})), {"found_inf"});
  const auto others = [&](const Rules& rules) {
    return [=] {
      UpdateOnDevice capturable(at::kCPU);
      capturable.send(one);
      capturable.send(rules);
    };
  };
  expect_error(others(std::vector<AdamRule>(2)), {"as many rules as before"});
  expect_error(others(std::vector<AdagradRule>(1)), {"of the same kind"});
  expect_error([] { UpdateOnDevice(at::kCPU).run({}, {}); }, {"rules that were sent"});
}

}  // namespace
}  // namespace semitone::kernels::update_test
