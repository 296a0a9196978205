// Steps whose rules are read from the device's memory.

#include "src/kernels/capturable_update.h"

#include "tests/kernels/update_steps.h"
#include "tests/support/errors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <array>
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

TEST(CapturableUpdate, TakesTheStepsOfTheRulesThatWereSent) {
  torch::manual_seed(5);
  const std::vector<Update> items = captured_items();
  for (const auto& rules : captured_rules(items.size())) {
    const std::vector<Update> got = copies_of(items);
    const std::vector<Update> want = copies_of(items);
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
      const std::vector<Update> got = copies_of(items);
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

}  // namespace
}  // namespace semitone::kernels::update_test
