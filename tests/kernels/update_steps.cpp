#include "tests/kernels/update_steps.h"

#include "src/kernels/multi_tensor_lamb.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <type_traits>

namespace semitone::kernels::update_test {
namespace {

template <typename Rule>
Step step(const std::string& name, std::size_t states, const Rule& rule) {
  return {name,
          states,
          [=](std::span<const Update> items) {
            multi_tensor_update(items, std::vector<Rule>(items.size(), rule));
          },
          [=](const Update& item) { ref::update(item, rule); },
          Rule::kTakesBf16State && states > 0,
          !std::is_same_v<Rule, LambRule>};
}

// LAMB's first pass.
Step lamb_moments_step(const std::string& name, const LambRule& rule) {
  return {name,
          2,
          [=](std::span<const Update> items) {
            multi_tensor_lamb_moments(items, std::vector<LambRule>(items.size(), rule));
          },
          [=](const Update& item) { ref::lamb_moments(item, rule); },
          false,
          true};
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

}  // namespace

at::Tensor copy_of(const at::Tensor& tensor) {
  return tensor.defined() ? in_layout_of(tensor, tensor, tensor.scalar_type()) : tensor;
}

std::vector<Step> all_steps() {
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
  std::vector<Step> steps{
      step("adam", 2, l2),
      step("adamw", 2, decoupled),
      step("amsgrad", 3, decoupled),
      step("sgd", 0, SgdRule{.weight_decay = 0.03, .lr = 0.13}),
      step("momentum", 1, momentum),
      step("momentum, first step", 1, first),
      step("nesterov", 1, nesterov),
      step("decoupled weight decay, trust ratio", 1, decoupled_sgd),
      step("novograd, decay in the update", 1,
           NovoGradRule{.grad_scale = 0.3,
                        .beta3 = 0.2,
                        .correction = 1.7,
                        .decoupled_weight_decay = 0.09,
                        .lr = 0.01}),
      step("novograd, decay in the moment", 1,
           NovoGradRule{.grad_scale = 1.3,
                        .weight_decay = 0.09,
                        .beta1 = 0.8,
                        .correction = 1.7,
                        .lr = 0.01}),
      step("adagrad", 1,
           AdagradRule{.grad_scale = 0.7, .weight_decay = 0.09, .eps = 1e-3, .lr = 0.017}),
      step("adagrad, decoupled weight decay", 1,
           AdagradRule{.decoupled_weight_decay = 0.09, .eps = 1e-3, .lr = 0.017}),
      lamb_moments_step("lamb, moments", lamb),
      lamb_moments_step("lamb, moments, L2", lamb_l2),
      step("lamb, parameters", 2, lamb),
      step("lamb, parameters, L2", 2, lamb_l2),
  };
  test::for_all_rules([&]<typename Rule>(Rule rule) {
    rule.grad_scale = 0.7;
    rule.weight_decay = 0.05;
    const std::size_t states = std::is_same_v<Rule, SgdRule> ? 0 : Rule::kStates;  // no momentum
    steps.push_back(step(std::string(Rule::kName) + " with defaults", states, rule));
  });
  return steps;
}

std::vector<Step> steps_for(const Case& c) {
  std::vector<Step> steps = all_steps();
  if (c.bf16_state) std::erase_if(steps, [](const Step& step) { return !step.takes_bf16_state; });
  return steps;
}

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
    if (w.defined() || g.defined()) test::expect_bitwise_equal(g, w);
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

}  // namespace semitone::kernels::update_test
