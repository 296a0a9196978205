#pragma once

#include "semitone/optim/fused_optimizer.h"
#include "src/optim/fused_state.h"
#include "tests/optim/all_fused_optimizers.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

// Parameters, gradients and comparisons for the tests of all fused optimizers.
namespace semitone::test {

inline std::vector<at::Tensor> make_parameters(c10::ScalarType dtype = at::kFloat) {
  std::vector<at::Tensor> parameters;
  for (const auto& shape :
       std::vector<std::vector<std::int64_t>>{{7}, {}, {33, 5}, {0}, {2, 3, 4, 5}})
    parameters.push_back(torch::randn(shape).to(dtype).requires_grad_());
  return parameters;
}

// Copies to train in another way.
inline std::vector<at::Tensor> leaves_like(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> leaves = copies(tensors);
  for (at::Tensor& leaf : leaves) leaf.requires_grad_();
  return leaves;
}

// Gradients that are exact in every dtype, and stay so when they are scaled by powers of two.
inline std::vector<at::Tensor> make_grads(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> grads;
  grads.reserve(parameters.size());
  for (const at::Tensor& parameter : parameters)
    grads.push_back(torch::randint(-127, 128, parameter.sizes()).to(at::kFloat) / 64);
  return grads;
}

inline void set_grads(const std::vector<at::Tensor>& parameters,
                      const std::vector<at::Tensor>& grads, double scale = 1) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].mutable_grad() =
        grads[i].defined() ? (grads[i] * scale).to(parameters[i].scalar_type()) : at::Tensor();
  }
}

// Everything that an optimizer holds, as one list for comparison.
inline std::vector<at::Tensor> everything(const optim::FusedOptimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      all.push_back(parameter.detach().clone());
      all.push_back(torch::tensor(optimizer.steps_of(parameter)));
      const auto entry = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (entry == optimizer.state().end()) continue;
      const auto& state = static_cast<const optim::FusedState&>(*entry->second);
      for (const at::Tensor& tensor : state.tensors)
        if (tensor.defined()) all.push_back(tensor.clone());
      if (state.master_low.defined()) all.push_back(state.master_low.clone());
    }
  }
  return all;
}

// A test of each optimizer's behaviour.
class FusedOptimizers : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override { torch::manual_seed(7); }

  // Steps two optimizers over the same values, each by its own method, and compares everything they
  // hold.
  template <typename StepA, typename StepB>
  void expect_same_steps(const StepA& step_a, const StepB& step_b, int count = 4) {
    const auto a = make_parameters();
    const auto b = leaves_like(a);
    const auto optimizer_a = GetParam()(a);
    const auto optimizer_b = GetParam()(b);
    for (int i = 0; i < count; ++i) {
      const auto grads = make_grads(a);
      step_a(*optimizer_a, a, grads);
      step_b(*optimizer_b, b, grads);
      expect_bitwise_equal(everything(*optimizer_b), everything(*optimizer_a));
    }
  }
};

inline void plain_step(optim::FusedOptimizer& optimizer, const std::vector<at::Tensor>& parameters,
                       const std::vector<at::Tensor>& grads) {
  set_grads(parameters, grads);
  optimizer.step();
}

}  // namespace semitone::test
