// nn::linear_cross_entropy against its definition, and against LibTorch's operators in fp64.

#include "semitone/recompute/linear_cross_entropy.h"

#include "semitone/autocast/autocast.h"
#include "semitone/core/dtype.h"
#include "semitone/nn/fused_cross_entropy.h"
#include "semitone/recompute/checkpoint.h"
#include "src/core/tensor_memory.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace semitone::nn::linear_cross_entropy_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_error;
using Options = LinearCrossEntropyOptions;
using Loss = std::function<at::Tensor(const at::Tensor& input, const at::Tensor& weight,
                                      const at::Tensor& bias, const at::Tensor& target)>;

constexpr std::int64_t kRows = 40;
constexpr std::int64_t kFeatures = 24;
constexpr std::int64_t kClasses = 70;
constexpr std::int64_t kIgnored = 3;

struct Problem {
  at::Tensor input;
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor target;

  Problem to(c10::ScalarType dtype) const {
    return {input.to(dtype), weight.to(dtype), bias.defined() ? bias.to(dtype) : bias, target};
  }
};

Problem new_problem(bool with_bias = true) {
  torch::manual_seed(1);
  Problem problem{torch::randn({kRows, kFeatures}), torch::randn({kClasses, kFeatures}) / 3,
                  with_bias ? torch::randn({kClasses}) : at::Tensor(),
                  torch::randint(kClasses, {kRows}, torch::kLong)};
  problem.target.slice(0, 0, 5).fill_(kIgnored);
  return problem;
}

// The loss and the gradients of input, weight and bias.
std::vector<at::Tensor> results_of(const Problem& problem, const Loss& loss_of) {
  std::vector<at::Tensor> leaves;
  const auto leaf = [&](const at::Tensor& values) {
    return values.defined() ? leaves.emplace_back(values.detach().clone().requires_grad_())
                            : values;
  };
  const at::Tensor input = leaf(problem.input);
  const at::Tensor weight = leaf(problem.weight);
  const at::Tensor bias = leaf(problem.bias);
  const at::Tensor loss = loss_of(input, weight, bias, problem.target);
  // Rows have different gradients.
  loss.backward(torch::linspace(0.5, 2, loss.numel()).to(loss.scalar_type()).view_as(loss));
  std::vector<at::Tensor> results{loss.detach()};
  for (const at::Tensor& each : leaves) results.push_back(each.grad());
  return results;
}

Loss chunked(Options options = {}) {
  return [options](const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                   const at::Tensor& target) mutable {
    return linear_cross_entropy(input, weight, target, options.linear_bias(bias));
  };
}

Loss definition(FusedCrossEntropyOptions options = {}) {
  return [options](const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                   const at::Tensor& target) {
    return fused_cross_entropy(at::linear(input, weight, bias), target, options);
  };
}

TEST(LinearCrossEntropy, EqualsLibTorchsOperatorsInFp64) {
  const std::vector<std::pair<Options::reduction_t, at::Reduction::Reduction>> reductions{
      {torch::kMean, at::Reduction::Mean},
      {torch::kSum, at::Reduction::Sum},
      {torch::kNone, at::Reduction::None}};
  for (const bool with_bias : {false, true}) {
    const Problem problem = new_problem(with_bias).to(torch::kDouble);
    for (const auto& [reduction, code] : reductions) {
      for (const double smoothing : {0.0, 0.1, 1.0}) {
        const auto want =
            results_of(problem, [&, code = code](const auto& input, const auto& weight,
                                                 const auto& bias, const auto& target) {
              return at::cross_entropy_loss(at::linear(input, weight, bias), target, {}, code,
                                            kIgnored, smoothing);
            });
        for (const std::int64_t chunk_size : {1L, 16L, 35L, 69L, 70L, 1000L}) {
          SCOPED_TRACE(c10::str("bias ", with_bias, " reduction ", code, " smoothing ", smoothing,
                                " chunk_size ", chunk_size));
          EXPECT_TRUE(test::near(results_of(problem, chunked(Options()
                                                                 .reduction(reduction)
                                                                 .label_smoothing(smoothing)
                                                                 .ignore_index(kIgnored)
                                                                 .chunk_size(chunk_size))),
                                 want, test::reduction_tolerance(torch::kDouble, kClasses)));
        }
      }
    }
  }
}

TEST(LinearCrossEntropy, RoundsLikeItsDefinition) {
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
    const Problem problem = new_problem().to(dtype);
    const auto exact = results_of(problem.to(torch::kDouble), definition());
    const auto defined = results_of(problem, definition());
    for (const std::int64_t chunk_size : {16L, 70L}) {
      SCOPED_TRACE(c10::str(dtype_name(dtype), " chunk_size ", chunk_size));
      const auto got = results_of(problem, chunked(Options().chunk_size(chunk_size)));
      for (std::size_t i = 0; i < got.size(); ++i) {
        SCOPED_TRACE(i);
        EXPECT_EQ(got[i].scalar_type(), defined[i].scalar_type());
        const auto error = [&](const at::Tensor& result) {
          return (result.to(torch::kDouble) - exact[i]).norm().item<double>();
        };
        // In one product or several, sums are rounded in another order.
        EXPECT_LT(error(got[i]),
                  1.5 * error(defined[i]) +
                      test::pointwise_tolerance(torch::kFloat) * exact[i].norm().item<double>());
      }
    }
  }
}

TEST(LinearCrossEntropy, BothPassesAreInTheRegionsOfTheForwardPass) {
  const Problem problem = new_problem();
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    for (const bool libtorchs : {false, true}) {
      SCOPED_TRACE(c10::str(dtype_name(dtype), libtorchs ? " at::autocast" : " amp::Autocast"));
      const auto in_region = [&](const Loss& loss_of) -> Loss {
        return [&, loss_of](const auto& input, const auto& weight, const auto& bias,
                            const auto& target) {
          if (!libtorchs) {
            const amp::Autocast region(torch::kCPU, dtype);
            return loss_of(input, weight, bias, target);
          }
          at::autocast::set_autocast_enabled(at::kCPU, true);
          at::autocast::set_autocast_dtype(at::kCPU, dtype);
          const at::Tensor loss = loss_of(input, weight, bias, target);
          at::autocast::clear_cache();
          at::autocast::set_autocast_enabled(at::kCPU, false);
          return loss;
        };
      };
      const auto want = results_of(problem, in_region(definition()));
      const auto got = results_of(problem, in_region(chunked(Options().chunk_size(16))));
      const auto exact = results_of(problem.to(torch::kDouble), definition());
      for (std::size_t i = 0; i < got.size(); ++i) {
        SCOPED_TRACE(i);
        EXPECT_EQ(got[i].scalar_type(), torch::kFloat);
        const double size = exact[i].norm().item<double>();
        const auto distance = [&](const at::Tensor& one, const at::Tensor& other) {
          return (one - other).norm().item<double>() / size;
        };
        EXPECT_LT(distance(got[i], want[i]), 2 * test::rounding_tolerance(dtype));
        // The products were of 16-bit numbers. In the loss, a mean, their errors may cancel.
        if (i == 0) continue;
        EXPECT_GT(distance(got[i], exact[i]), test::pointwise_tolerance(torch::kFloat));
      }
    }
  }
}

struct HeadImpl : torch::nn::Module {
  HeadImpl() { weight = register_parameter("weight", torch::randn({kClasses, kFeatures})); }
  at::Tensor weight;
};
TORCH_MODULE(Head);

TEST(LinearCrossEntropy, IsNotInFp8) {
  Head head;
  const Problem problem = new_problem();
  const auto results_in = [&](const amp::CastPolicy& policy) {
    const at::Tensor input = problem.input.detach().clone().requires_grad_();
    head->zero_grad();
    {
      const amp::Autocast region(policy.bind(*head));
      linear_cross_entropy(input, head->weight, problem.target, Options().chunk_size(16))
          .backward();
    }
    return std::vector<at::Tensor>{input.grad(), head->weight.grad().clone()};
  };
  const amp::CastPolicy policy = amp::CastPolicy::semitone({torch::kCPU, torch::kBFloat16});
  const auto want = results_in(policy);
  const auto got = results_in(amp::CastPolicy(policy).fp8(amp::Fp8Options()));
  for (std::size_t i = 0; i < got.size(); ++i) test::expect_bitwise_equal(got[i], want[i]);
}

// LibTorch then splits the layer into operators that are lowered themselves.
TEST(LinearCrossEntropy, ThePolicyMayLeaveLinearLayersAlone) {
  const Problem problem = new_problem();
  amp::CastPolicy policy = amp::CastPolicy::semitone({torch::kCPU, torch::kBFloat16});
  policy.leave("linear");
  const auto in_region = [&](const Loss& loss_of) -> Loss {
    return
        [&, loss_of](const auto& input, const auto& weight, const auto& bias, const auto& target) {
          const amp::Autocast region(policy);
          return loss_of(input, weight, bias, target);
        };
  };
  const auto want = results_of(problem, in_region(definition()));
  for (const std::int64_t size : {std::int64_t{16}, kClasses}) {
    const auto got = results_of(problem, in_region(chunked(Options().chunk_size(size))));
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_LT((got[i] - want[i]).norm().item<double>(),
                2 * test::rounding_tolerance(torch::kBFloat16) * want[i].norm().item<double>())
          << i;
    }
  }
}

TEST(LinearCrossEntropy, AKeptWeightIsNotCast) {
  const Problem problem = new_problem(false);
  Head head;
  const auto loss_and_gradient = [&] {
    head->weight.mutable_grad() = at::Tensor();
    const at::Tensor loss = linear_cross_entropy(problem.input, head->weight, problem.target);
    return std::pair(loss, [&head, loss] {
      loss.backward();
      return head->weight.grad();
    });
  };
  const auto in_region = [&](const amp::CastPolicy& policy) {
    const auto [loss, gradient] = [&] {
      const amp::Autocast region(policy);
      return loss_and_gradient();
    }();
    return std::vector{loss.detach(), gradient()};
  };
  const auto [loss, gradient] = loss_and_gradient();
  const std::vector<at::Tensor> want{loss.detach(), gradient()};
  amp::CastPolicy policy = amp::CastPolicy::semitone(torch::kBFloat16);
  EXPECT_NE(in_region(policy)[0].item<double>(), want[0].item<double>());
  policy.keep_fp32_params("weight");
  expect_bitwise_equal(in_region(policy.bind(*head)), want);
}

TEST(LinearCrossEntropy, LossesOfAnySizeHaveTheirDigits) {
  // Of class 0, in the first chunk of two or in the only one: 3e-7 to 20.
  const at::Tensor margin = torch::linspace(-20, 15, 36);
  const at::Tensor weight = torch::tensor({1.0F, 0.0F, 0.0F, -1.0F}).unsqueeze(1);
  const at::Tensor target = torch::zeros({36}, torch::kLong);
  const at::Tensor want = at::cross_entropy_loss(
      margin.to(torch::kDouble).unsqueeze(1).matmul(weight.to(torch::kDouble).t()), target, {},
      at::Reduction::None);
  for (const std::int64_t chunk_size : {1L, 2L, 4L}) {
    const at::Tensor got =
        linear_cross_entropy(margin.unsqueeze(1), weight, target,
                             Options().reduction(torch::kNone).chunk_size(chunk_size));
    // Rounded to fp32: the sum of the exponentials, its logarithm, and the loss.
    const at::Tensor error = (got - want).abs() / want.clamp_min(1);
    EXPECT_LT(error.max().item<double>(), test::rounding_tolerance(torch::kFloat, 3)) << chunk_size;
  }
}

TEST(LinearCrossEntropy, InfinitiesAndNansAreThoseOfTheDefinition) {
  // Logits are the bias.
  const at::Tensor input = torch::zeros({3, 1});
  const at::Tensor weight = torch::linspace(-1, 2, 6).unsqueeze(1);
  const at::Tensor target = torch::tensor({0, 3, 5}, torch::kLong);
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto& logits : std::vector<std::vector<float>>{{-inf, -inf, 1, 2, 3, 4},
                                                            {1, 2, -inf, -inf, 3, -inf},
                                                            {-inf, -inf, -inf, -inf, -inf, -inf},
                                                            {1, inf, 2, 3, 4, 5},
                                                            {1, 2, nan, 3, 4, 5},
                                                            {1e30F, -1e30F, 0, 3, 4, 5}}) {
    const at::Tensor bias = torch::tensor(logits);
    const auto want = definition(FusedCrossEntropyOptions().reduction(torch::kNone));
    const auto got = chunked(Options().reduction(torch::kNone).chunk_size(2));
    for (const auto dtype : {torch::kFloat, torch::kDouble}) {
      SCOPED_TRACE(c10::str(logits, " ", dtype));
      const Problem problem{input.to(dtype), weight.to(dtype), bias.to(dtype), target};
      const auto results = results_of(problem, got);
      const auto wanted = results_of(problem, want);
      for (std::size_t i = 0; i < results.size(); ++i)
        test::expect_close(results[i], wanted[i], test::reduction_tolerance(dtype, 6));
    }
  }
}

TEST(LinearCrossEntropy, WithoutRowsThatCountTheMeanIsNanAndTheGradientZero) {
  for (const std::int64_t rows : {0, 4}) {
    const Problem problem{torch::randn({rows, 5}),
                          torch::randn({7, 5}),
                          {},
                          torch::full({rows}, kIgnored, torch::kLong)};
    const auto got = results_of(problem, chunked(Options().ignore_index(kIgnored).chunk_size(2)));
    EXPECT_TRUE(got[0].isnan().item<bool>());
    expect_bitwise_equal(got[1], torch::zeros({rows, 5}));
    expect_bitwise_equal(got[2], torch::zeros({7, 5}));
  }
}

TEST(LinearCrossEntropy, TakesSequences) {
  const Problem problem = new_problem(false);
  const at::Tensor losses = linear_cross_entropy(problem.input, problem.weight, problem.target,
                                                 Options().reduction(torch::kNone));
  const at::Tensor of_sequences = linear_cross_entropy(
      problem.input.view({8, 5, kFeatures}), problem.weight,
      problem.target.view({8, 5}).to(torch::kByte), Options().reduction(torch::kNone));
  expect_bitwise_equal(of_sequences, losses.view({8, 5}));
  const at::Tensor of_one =
      linear_cross_entropy(problem.input[7], problem.weight, problem.target[7]);
  EXPECT_EQ(of_one.dim(), 0);
  EXPECT_TRUE(test::near(of_one, losses[7], test::reduction_tolerance(torch::kFloat, kFeatures)));
}

TEST(LinearCrossEntropy, GivesGradientsToWhatNeedsThem) {
  const Problem problem = new_problem();
  const auto all = results_of(problem, chunked(Options().chunk_size(16)));
  for (int only = 0; only < 3; ++only) {
    std::vector<at::Tensor> values{problem.input.clone(), problem.weight.clone(),
                                   problem.bias.clone()};
    values[static_cast<std::size_t>(only)].requires_grad_();
    linear_cross_entropy(values[0], values[1], problem.target,
                         Options().linear_bias(values[2]).chunk_size(16))
        .backward(torch::tensor(0.5F));
    for (int i = 0; i < 3; ++i) {
      const at::Tensor grad = values[static_cast<std::size_t>(i)].grad();
      if (i == only) {
        expect_bitwise_equal(grad, all[static_cast<std::size_t>(i) + 1]);
      } else {
        EXPECT_FALSE(grad.defined());
      }
    }
  }
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(linear_cross_entropy(problem.input, problem.weight, problem.target).requires_grad());
}

TEST(LinearCrossEntropy, AWeightMayAlsoBeThatOfTheEmbedding) {
  torch::manual_seed(2);
  const at::Tensor tokens = torch::randint(kClasses, {30}, torch::kLong);
  const at::Tensor values = torch::randn({kClasses, kFeatures});
  const auto gradient = [&](bool in_chunks) {
    const at::Tensor weight = values.clone().requires_grad_();
    const at::Tensor hidden = at::embedding(weight, tokens).tanh();
    const at::Tensor next = tokens.roll(-1);
    (in_chunks ? linear_cross_entropy(hidden, weight, next, Options().chunk_size(16))
               : fused_cross_entropy(at::linear(hidden, weight), next))
        .backward();
    return weight.grad();
  };
  EXPECT_TRUE(test::near(gradient(true), gradient(false),
                         test::reduction_tolerance(torch::kFloat, kClasses)));
}

// LibTorch keeps the casts of a region for all uses, with the gradient function of the first one.
TEST(LinearCrossEntropy, ItsWeightMayBeUsedAgainInARegionOfLibTorchs) {
  const Problem problem = new_problem();
  const auto gradient = [&](const Loss& loss_of, double factor) {
    const at::Tensor weight = problem.weight.clone().requires_grad_();
    const at::Tensor bias = problem.bias.clone().requires_grad_();
    const at::Tensor input = problem.input.clone().requires_grad_();
    const bool had_cache = at::autocast::is_autocast_cache_enabled();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, torch::kBFloat16);
    const at::Tensor loss = loss_of(input, weight, bias, problem.target);
    const at::Tensor logits = at::linear(input, weight, bias);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_EQ(at::autocast::is_autocast_cache_enabled(), had_cache);
    (loss + factor * logits.to(torch::kFloat).logsumexp(1).mean()).backward();
    return std::vector{weight.grad(), bias.grad(), input.grad()};
  };
  for (const std::int64_t chunk_size : {16L, 1000L}) {
    const Loss loss_of = chunked(Options().chunk_size(chunk_size));
    const auto want = gradient(definition(), 3);
    const auto got = gradient(loss_of, 3);
    const auto of_the_loss_alone = gradient(loss_of, 0);
    for (std::size_t i = 0; i < want.size(); ++i) {
      SCOPED_TRACE(c10::str("chunk_size ", chunk_size, " gradient ", i));
      const auto norm = want[i].norm().item<double>();
      // The two parts are rounded to bf16 before or after they are added.
      EXPECT_LT((got[i] - want[i]).norm().item<double>(), 0.01 * norm);
      EXPECT_GT((of_the_loss_alone[i] - want[i]).norm().item<double>(), 0.1 * norm);
    }
  }
}

// LibTorch splits the layer, and the transposed weight must not be taken for the leaf itself.
TEST(LinearCrossEntropy, CanBeDifferentiatedAgainWhereLinearLayersAreLeftAlone) {
  const Problem problem = new_problem();
  amp::CastPolicy policy = amp::CastPolicy::semitone({torch::kCPU, torch::kBFloat16});
  policy.leave("linear");
  const at::Tensor weight = problem.weight.clone().requires_grad_();
  const at::Tensor loss = [&] {
    const amp::Autocast region(policy);
    return linear_cross_entropy(problem.input, weight, problem.target);
  }();
  const auto first = torch::autograd::grad({loss}, {weight}, {}, true, /*create_graph=*/true);
  first[0].square().sum().backward();
  EXPECT_TRUE(weight.grad().defined() && weight.grad().abs().max().item<double>() > 0);
}

TEST(LinearCrossEntropy, RunsTheHooksOfItsWeightsOnce) {
  const Problem problem = new_problem();
  const auto doubled = [&](const Loss& loss_of) {
    return results_of(
        problem, [&](const auto& input, const auto& weight, const auto& bias, const auto& target) {
          for (const at::Tensor& each : {input, weight, bias})
            each.register_hook([](const at::Tensor& grad) { return grad * 2; });
          return loss_of(input, weight, bias, target);
        });
  };
  for (const std::int64_t size : {std::int64_t{16}, kClasses}) {
    const Loss loss_of = chunked(Options().chunk_size(size));
    auto want = results_of(problem, loss_of);
    for (std::size_t i = 1; i < want.size(); ++i) want[i] = want[i] * 2;
    expect_bitwise_equal(doubled(loss_of), want);
  }
}

TEST(LinearCrossEntropy, CanBeDifferentiatedAgain) {
  const Problem problem = new_problem().to(torch::kDouble);
  const auto second = [&](const Loss& loss_of) {
    std::vector<at::Tensor> leaves;
    for (const at::Tensor& values : {problem.input, problem.weight, problem.bias})
      leaves.push_back(values.clone().requires_grad_());
    const at::Tensor loss = loss_of(leaves[0], leaves[1], leaves[2], problem.target);
    const auto first = torch::autograd::grad({loss}, leaves, {}, true, /*create_graph=*/true);
    (first[0].square().sum() + first[1].square().sum() + first[2].square().sum()).backward();
    return test::gradients_of(leaves);
  };
  EXPECT_TRUE(test::near(second(chunked(Options().chunk_size(16))), second(definition()),
                         test::reduction_tolerance(torch::kDouble, kClasses)));
}

TEST(LinearCrossEntropy, CanBeRecomputedItself) {
  const Problem problem = new_problem();
  const Loss loss_of = chunked(Options().chunk_size(16));
  const auto want = results_of(problem, loss_of);
  const auto got = results_of(
      problem, [&](const auto& input, const auto& weight, const auto& bias, const auto& target) {
        return checkpoint(loss_of, input, weight, bias, target);
      });
  expect_bitwise_equal(got, want);
}

TEST(LinearCrossEntropy, IsLibTorchsOperatorsInTracesAndForwardDerivatives) {
  torch::manual_seed(3);
  const at::Tensor weight = torch::randn({5, 8});
  const at::Tensor target = torch::arange(4);
  const auto loss_of = [&](const at::Tensor& input) {
    return linear_cross_entropy(input, weight, target);
  };
  const auto plain = [&](const at::Tensor& input) {
    return torch::cross_entropy_loss(torch::linear(input, weight), target);
  };
  const auto graph =
      torch::jit::tracer::trace(
          {torch::randn({4, 8})},
          [&](const torch::jit::Stack& in) { return torch::jit::Stack{loss_of(in[0].toTensor())}; },
          [](const torch::autograd::Variable&) { return ""; })
          .first->graph;
  EXPECT_EQ(graph->toString().find("aten::empty"), std::string::npos);
  const double tolerance = test::reduction_tolerance(torch::kFloat, 8);
  torch::jit::Stack stack{torch::randn({4, 8})};
  const at::Tensor want = plain(stack[0].toTensor());
  torch::jit::GraphExecutor(graph, "traced").run(stack);
  test::expect_close(stack.at(0).toTensor(), want, tolerance);

  const auto level = static_cast<std::int64_t>(torch::autograd::ForwardADLevel::get_next_idx());
  {
    const at::Tensor dual =
        at::_make_dual(torch::randn({4, 8}).requires_grad_(), torch::randn({4, 8}), level);
    const auto tangent = [&](const at::Tensor& of) {
      return std::get<1>(at::_unpack_dual(of, level)).detach();
    };
    test::expect_close(tangent(loss_of(dual)), tangent(plain(dual)), tolerance);
  }
  torch::autograd::ForwardADLevel::release_idx(static_cast<std::uint64_t>(level));
}

TEST(LinearCrossEntropy, DoesNotDependOnThreads) {
  const Problem problem = new_problem();
  const int threads = at::get_num_threads();
  const auto want = chunked(Options().chunk_size(16))(problem.input, problem.weight, problem.bias,
                                                      problem.target);
  at::set_num_threads(threads == 1 ? 2 : 1);
  const auto got = chunked(Options().chunk_size(16))(problem.input, problem.weight, problem.bias,
                                                     problem.target);
  at::set_num_threads(threads);
  expect_bitwise_equal(got, want);
}

TEST(LinearCrossEntropy, HasTheLogitsOfOneChunkInMemory) {
  const std::int64_t rows = 256;
  const std::int64_t classes = 8192;
  const Problem problem{torch::randn({rows, 8}),
                        torch::randn({classes, 8}),
                        {},
                        torch::randint(classes, {rows}, torch::kLong)};
  const auto peak = [&](const Loss& loss_of) {
    const TensorMemoryMeter meter;
    results_of(problem, loss_of);
    return meter.peak_bytes();
  };
  const std::int64_t logits = rows * classes * 4;
  EXPECT_GT(peak(definition()), logits);
  EXPECT_LT(peak(chunked(Options().chunk_size(512))), logits / 4);
}

TEST(LinearCrossEntropy, WrongArgumentsAreErrors) {
  const Problem p = new_problem(false);
  expect_error([&] { linear_cross_entropy({}, p.weight, p.target); },
               {"nn.linear_cross_entropy", "an input as a tensor"});
  expect_error([&] { linear_cross_entropy(p.input, p.weight.t(), p.target); },
               {"a linear_weight (C, H)", "[40, 24] and [24, 70]"});
  expect_error([&] { linear_cross_entropy(p.input, p.weight, p.target.slice(0, 1)); },
               {"targets of shape [40]", "got targets of shape [39]"});
  expect_error([&] { linear_cross_entropy(p.input, p.weight, p.target.to(torch::kFloat)); },
               {"int64 targets", "float32"});
  expect_error([&] { linear_cross_entropy(p.input, p.weight, p.target.to(torch::kMeta)); },
               {"targets on the input's device cpu, got some on meta"});
  expect_error([&] { linear_cross_entropy(p.input, p.weight, p.target + 60); },
               {"targets in [0, 70)", "in row"});
  expect_error(
      [&] {
        linear_cross_entropy(p.input, p.weight, p.target, Options().linear_bias(torch::ones({3})));
      },
      {"a linear_bias of shape [70]", "[3]"});
  expect_error(
      [&] { linear_cross_entropy(p.input, p.weight, p.target, Options().label_smoothing(2)); },
      {"label_smoothing in [0, 1]"});
  expect_error([&] { linear_cross_entropy(p.input, p.weight, p.target, Options().chunk_size(0)); },
               {"a chunk_size of at least 1"});
}

}  // namespace
}  // namespace semitone::nn::linear_cross_entropy_test
