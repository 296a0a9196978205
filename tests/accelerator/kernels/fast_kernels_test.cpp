#include "semitone/amp/initialize.h"
#include "semitone/autocast/autocast.h"
#include "semitone/optim/fused_sgd.h"
#include "tests/accelerator/training.h"
#include "tests/support/errors.h"
#include "tests/support/recorded_events.h"
#include "tests/support/tolerance.h"

#include <torch/nn.h>
#include <torch/types.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

// Semitone's CUDA kernels in place of LibTorch's, in models that do not name them.
namespace semitone::test::accelerator::fast_kernels_test {
namespace {

using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Tensors&)>;

struct AcceleratorFastKernels : AcceleratorTest {};

amp::CastPolicy policy_on(c10::DeviceType type, at::ScalarType dtype, bool on_gpu = true) {
  return amp::CastPolicy::semitone({type, dtype}).fast_kernels_on_gpu(on_gpu);
}

// An operator with inputs that have gradients.
struct Case {
  std::string op;
  std::vector<std::vector<std::int64_t>> shapes;
  Function function;
  std::int64_t terms;  // of its longest sum
};

at::Tensor targets(const at::Tensor& like) {
  return torch::tensor({1, 0, -100, 4, 2, 2}).to(like.device());
}

std::vector<Case> cases() {
  return {
      {"layer_norm",
       {{6, 40}, {40}, {40}},
       [](const Tensors& x) { return at::layer_norm(x[0], {40}, x[1], x[2]); },
       240},
      {"rms_norm",
       {{6, 40}, {40}},
       [](const Tensors& x) { return at::rms_norm(x[0], {40}, x[1]); },
       240},
      {"batch_norm",
       {{5, 8, 3, 3}, {8}, {8}},
       [](const Tensors& x) {
         return at::batch_norm(x[0], x[1], x[2], {}, {}, true, 0.1, 1e-5, true);
       },
       45},
      {"gelu", {{6, 40}}, [](const Tensors& x) { return at::gelu(x[0]); }, 1},
      {"gelu", {{6, 40}}, [](const Tensors& x) { return at::gelu(x[0], "tanh"); }, 1},
      {"cross_entropy_loss",
       {{6, 5}},
       [](const Tensors& x) { return at::cross_entropy_loss(x[0], targets(x[0])); },
       30},
      {"cross_entropy_loss",
       {{6, 5}},
       [](const Tensors& x) {
         return at::cross_entropy_loss(x[0], targets(x[0]), {}, at::Reduction::Sum, -100, 0.1);
       },
       30},
  };
}

// The function's result and the gradients of its inputs, on the CPU.
struct Outcome {
  Tensors tensors;
  std::vector<std::pair<std::string, std::string>> kernels;
};

Outcome outcome_of(const Case& of, c10::Device where, const amp::CastPolicy& policy) {
  torch::manual_seed(5);
  Tensors inputs;
  for (const auto& shape : of.shapes) {
    const at::Tensor value = torch::randn(shape);
    // Weights of norms are fp32 in models.
    inputs.push_back(
        (inputs.empty() ? value.to(policy.dtype()) : value).to(where).requires_grad_());
  }
  const RecordedEvents events;
  at::Tensor result;
  {
    const amp::Autocast region(policy);
    result = of.function(inputs);
  }
  const at::Tensor factors =
      torch::arange(result.numel()).to(at::kFloat).sin().view(result.sizes()).to(where);
  (result.to(at::kFloat) * (result.dim() == 0 ? torch::ones({}, factors.options()) : factors))
      .sum()
      .backward();
  Outcome outcome{{result.detach().cpu()}, events.operators()};
  for (const at::Tensor& input : inputs) outcome.tensors.push_back(input.grad().cpu());
  return outcome;
}

TEST_F(AcceleratorFastKernels, AreReachedAndGiveTheCPUsResults) {
  for (const Case& of : cases()) {
    for (const auto dtype : {at::kBFloat16, at::kHalf}) {
      SCOPED_TRACE(of.op + " " + c10::toString(dtype));
      // On a CPU layer norm is not in the list of operators that return fp32.
      const Outcome want =
          outcome_of(of, at::kCPU, policy_on(at::kCPU, dtype).keep_fp32("layer_norm"));
      const Outcome got = outcome_of(of, device(), policy_on(kType, dtype));
      const std::pair<std::string, std::string> ours(of.op, "semitone");
      EXPECT_EQ(got.kernels, std::vector{ours});
      EXPECT_EQ(want.kernels, std::vector{ours});
      const Outcome stock = outcome_of(of, device(), policy_on(kType, dtype, false));
      EXPECT_EQ(got.tensors[0].scalar_type(), stock.tensors[0].scalar_type());
      ASSERT_EQ(got.tensors.size(), want.tensors.size());
      for (std::size_t i = 0; i < want.tensors.size(); ++i) {
        SCOPED_TRACE(i);
        EXPECT_TRUE(near(got.tensors[i].to(at::kFloat), want.tensors[i].to(at::kFloat),
                         reduction_tolerance(dtype, of.terms)));
      }
    }
  }
}

TEST_F(AcceleratorFastKernels, AreOffUnlessThePolicySaysSo) {
  for (const Case& of : cases()) {
    SCOPED_TRACE(of.op);
    const auto off = policy_on(kType, at::kBFloat16, false);
    EXPECT_TRUE(outcome_of(of, device(), off).kernels.empty());
    const auto without = policy_on(kType, at::kBFloat16).fast_kernel(of.op, false);
    EXPECT_TRUE(outcome_of(of, device(), without).kernels.empty());
  }
  EXPECT_FALSE(amp::CastPolicy::semitone({at::kCUDA, at::kHalf}).fast_kernels_on_gpu());
}

// Only kernels that exist for GPUs, though all are on.
TEST_F(AcceleratorFastKernels, LeaveOtherOperatorsToLibTorch) {
  const RecordedEvents events;
  const amp::Autocast region(policy_on(kType, at::kBFloat16));
  const auto x = torch::ones({1, 8, 256, 64}, at::TensorOptions(device()).dtype(at::kBFloat16));
  at::relu(x);
  at::add(x, x);
  at::dropout(x, 0.5, true);
  EXPECT_TRUE(events.operators().empty());
}

// At both levels, and from O2's region for 16-bit models too, which a GPU otherwise does without.
TEST_F(AcceleratorFastKernels, AreReachedByInitializedModels) {
  for (const std::string level : {"O1", "O2"}) {
    for (const bool on : {false, true}) {
      SCOPED_TRACE(level + (on ? " on" : " off"));
      auto net = make_net(device());
      optim::FusedSGD optimizer(net->parameters(), optim::FusedSGDOptions(0.1));
      auto options = amp::Options(level).dtype(at::kBFloat16).verbosity(0);
      options.policy(policy_on(kType, at::kBFloat16, on));
      auto mixed = amp::initialize(net, optimizer, options);
      const RecordedEvents events;
      const at::Tensor input = input_of(0, device());
      mixed.scale_loss(loss_of(mixed.forward(net, input), input), optimizer).backward();
      mixed.step(optimizer);
      const std::vector<std::pair<std::string, std::string>> norms{{"batch_norm", "semitone"},
                                                                   {"layer_norm", "semitone"}};
      EXPECT_EQ(events.operators(), on ? norms : decltype(norms)());
    }
  }
}

}  // namespace
}  // namespace semitone::test::accelerator::fast_kernels_test
