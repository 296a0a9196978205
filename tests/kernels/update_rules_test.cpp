// The rules of the optimizers, computed by hand.

#include "src/kernels/multi_tensor_lamb.h"
#include "src/kernels/multi_tensor_update.h"
#include "tests/kernels/update_steps.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace semitone::kernels::update_test {
namespace {

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
  ref::update(item, rule);
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
  ref::update(item, rule);
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
  ref::update(item, rule);
  EXPECT_DOUBLE_EQ(item.state[0].item<double>(), new_m);
  EXPECT_DOUBLE_EQ(item.state[1].item<double>(), new_v);
  EXPECT_DOUBLE_EQ(item.param.item<double>(), p - 0.7 * u);
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
  ref::update(item, rule);
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
  ref::update(item, rule);
  EXPECT_DOUBLE_EQ(item.state[0].item<double>(), new_h);
  EXPECT_DOUBLE_EQ(item.param.item<double>(), p - 0.7 * (g / (std::sqrt(new_h) + 0.01) + 0.2 * p));
}

// Their smallest normal number is 2^-1022: 1e-310 becomes 0, 1e-300 does not.
TEST(StateDefinitions, FlushSubnormalNumbersOfFp64) {
  for (const Step& step : all_steps()) {
    if (step.states == 0 || !step.writes_state) continue;
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

}  // namespace
}  // namespace semitone::kernels::update_test
