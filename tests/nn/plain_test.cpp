// Fused layers in traces and in forward-mode derivatives, which support LibTorch's operators only.

#include "semitone/nn/fused_batch_norm.h"
#include "semitone/nn/fused_cross_entropy.h"
#include "semitone/nn/fused_dropout.h"
#include "semitone/nn/fused_gelu.h"
#include "semitone/nn/fused_layer_norm.h"
#include "semitone/nn/fused_rms_norm.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace semitone::nn::plain_test {
namespace {

using Function = std::function<at::Tensor(const at::Tensor& input)>;

struct Case {
  std::string op;
  Function fused;
  Function libtorch;
};

// Of inputs (6, 8).
std::vector<Case> cases() {
  torch::manual_seed(1);
  const at::Tensor weight = torch::randn({8});
  const at::Tensor bias = torch::randn({8});
  const at::Tensor target = torch::arange(6);
  FusedBatchNorm norm(8);
  {
    const torch::NoGradGuard no_grad;
    norm->weight.copy_(weight).requires_grad_(false);
    norm->bias.copy_(bias).requires_grad_(false);
  }
  return {
      {"aten::layer_norm", [=](const auto& x) { return fused_layer_norm(x, {8}, weight, bias); },
       [=](const auto& x) { return torch::layer_norm(x, {8}, weight, bias); }},
      {"aten::rms_norm", [=](const auto& x) { return fused_rms_norm(x, {8}, weight); },
       [=](const auto& x) { return torch::rms_norm(x, {8}, weight); }},
      {"aten::gelu", [](const auto& x) { return fused_gelu(x); },
       [](const auto& x) { return torch::gelu(x); }},
      {"aten::gelu", [=](const auto& x) { return fused_bias_gelu(x, bias, "tanh"); },
       [=](const auto& x) { return torch::gelu(x + bias, "tanh"); }},
      {"aten::cross_entropy_loss", [=](const auto& x) { return fused_cross_entropy(x, target); },
       [=](const auto& x) { return torch::cross_entropy_loss(x, target); }},
      {"aten::batch_norm", [norm](const auto& x) { return FusedBatchNorm(norm)->forward(x); },
       [=](const auto& x) {
         return torch::batch_norm(x, weight, bias, {}, {}, /*training=*/true, 0.1, 1e-5, false);
       }},
  };
}

torch::jit::Stack run_traced(const std::shared_ptr<torch::jit::Graph>& graph,
                             const at::Tensor& input) {
  torch::jit::Stack stack{input};
  torch::jit::GraphExecutor(graph, "traced").run(stack);
  return stack;
}

std::shared_ptr<torch::jit::Graph> traced(const Function& function, const at::Tensor& input) {
  return torch::jit::tracer::trace(
             {input},
             [&](const torch::jit::Stack& in) {
               return torch::jit::Stack{function(in[0].toTensor())};
             },
             [](const torch::autograd::Variable&) { return ""; })
      .first->graph;
}

// The level of forward-mode derivatives of a scope.
class Level {
 public:
  Level() = default;
  Level(const Level&) = delete;
  Level& operator=(const Level&) = delete;
  ~Level() { torch::autograd::ForwardADLevel::release_idx(index_); }

  at::Tensor dual(const at::Tensor& value, const at::Tensor& tangent) const {
    return at::_make_dual(value, tangent, static_cast<std::int64_t>(index_));
  }
  at::Tensor tangent_of(const at::Tensor& dual) const {
    return std::get<1>(at::_unpack_dual(dual, static_cast<std::int64_t>(index_)));
  }

 private:
  std::uint64_t index_ = torch::autograd::ForwardADLevel::get_next_idx();
};

const double kTolerance = test::reduction_tolerance(torch::kFloat, 8);

TEST(FusedLayers, AreLibTorchsOperatorsInTraces) {
  for (const Case& layer : cases()) {
    SCOPED_TRACE(layer.op);
    const auto graph = traced(layer.fused, torch::randn({6, 8}));
    EXPECT_NE(graph->toString().find(layer.op), std::string::npos);
    EXPECT_EQ(graph->toString().find("aten::empty"), std::string::npos);
    const at::Tensor other = torch::randn({6, 8});
    test::expect_close(run_traced(graph, other).at(0).toTensor(), layer.libtorch(other),
                       kTolerance);
  }
}

TEST(FusedLayers, HaveForwardDerivatives) {
  for (const Case& layer : cases()) {
    for (const bool recorded : {false, true}) {
      SCOPED_TRACE(testing::Message() << layer.op << ", " << recorded);
      const Level level;
      const at::Tensor tangent = torch::randn({6, 8});
      const at::Tensor dual = level.dual(torch::randn({6, 8}).requires_grad_(recorded), tangent);
      const at::Tensor got = level.tangent_of(layer.fused(dual));
      ASSERT_TRUE(got.defined());
      test::expect_close(got.detach(), level.tangent_of(layer.libtorch(dual)).detach(), kTolerance);
    }
  }
}

TEST(FusedLayers, DropOutInTracesAndForwardDerivatives) {
  const Function dropout = [](const at::Tensor& x) { return fused_dropout(x, 0.5); };
  const auto graph = traced(dropout, torch::ones({100}));
  EXPECT_NE(graph->toString().find("aten::dropout"), std::string::npos);
  const at::Tensor result = run_traced(graph, torch::ones({100})).at(0).toTensor();
  EXPECT_TRUE((result.eq(0) | result.eq(2)).all().item<bool>());
  const Level level;
  const at::Tensor dual = dropout(level.dual(torch::ones({100}), torch::ones({100})));
  ASSERT_TRUE(level.tangent_of(dual).defined());
  test::expect_bitwise_equal(level.tangent_of(dual), dual.detach());
}

}  // namespace
}  // namespace semitone::nn::plain_test
