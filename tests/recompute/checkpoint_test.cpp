// nn::checkpoint against plain calls of the same functions.

#include "semitone/recompute/checkpoint.h"

#include "semitone/amp/initialize.h"
#include "semitone/autocast/autocast.h"
#include "semitone/core/error.h"
#include "semitone/nn/fused_batch_norm.h"
#include "semitone/nn/fused_cross_entropy.h"
#include "semitone/nn/fused_dropout.h"
#include "semitone/nn/fused_gelu.h"
#include "semitone/nn/fused_layer_norm.h"
#include "src/core/tensor_memory.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace semitone::nn::checkpoint_test {
namespace {

using ::testing::HasSubstr;
using Call = std::function<at::Tensor(torch::nn::Sequential, at::Tensor)>;

const Call kPlain = [](torch::nn::Sequential block, const at::Tensor& x) {
  return block->forward(x);
};
const Call kCheckpointed = [](torch::nn::Sequential block, const at::Tensor& x) {
  return checkpoint(std::move(block), x);
};

// Three blocks of equal shapes: matrix products, batch norm and dropout.
std::vector<torch::nn::Sequential> new_blocks() {
  torch::manual_seed(3);
  std::vector<torch::nn::Sequential> blocks;
  for (int i = 0; i < 3; ++i) {
    blocks.emplace_back(torch::nn::Linear(32, 64), torch::nn::BatchNorm1d(64), torch::nn::GELU(),
                        torch::nn::Dropout(0.3), torch::nn::Linear(64, 32));
  }
  return blocks;
}

// What a training step leaves.
struct Step {
  at::Tensor loss;
  at::Tensor input_grad;
  std::vector<at::Tensor> grads;
  std::vector<at::Tensor> buffers;
  at::Tensor next_random;
};

Step step_of(
    const Call& call, const std::function<void(const at::Tensor&)>& backward =
                          [](const at::Tensor& loss) { loss.backward(); }) {
  auto blocks = new_blocks();
  torch::manual_seed(7);
  const at::Tensor x = torch::randn({16, 32}).requires_grad_();
  Step step;
  {
    at::Tensor y = x;
    for (auto& block : blocks) y = call(block, y);
    step.loss = y.square().mean();
  }
  backward(step.loss);
  step.input_grad = x.grad();
  for (auto& block : blocks) {
    for (const at::Tensor& parameter : block->parameters()) step.grads.push_back(parameter.grad());
    for (const at::Tensor& buffer : block->buffers()) step.buffers.push_back(buffer);
  }
  step.next_random = torch::rand({4});
  return step;
}

void expect_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_TRUE(torch::equal(got[i], want[i])) << i << ": " << (got[i] - want[i]).abs().max();
}

void expect_equal(const Step& got, const Step& want) {
  EXPECT_TRUE(torch::equal(got.loss, want.loss));
  EXPECT_TRUE(torch::equal(got.input_grad, want.input_grad));
  expect_equal(got.grads, want.grads);
  expect_equal(got.buffers, want.buffers);
  EXPECT_TRUE(torch::equal(got.next_random, want.next_random));
}

TEST(Checkpoint, IsBitForBitAPlainCallWithDropoutAndRunningStatistics) {
  const Step plain = step_of(kPlain);
  expect_equal(step_of(kCheckpointed), plain);
  // Random numbers that are drawn between the passes change nothing.
  const Step drawn = step_of(kCheckpointed, [](const at::Tensor& loss) {
    const auto generator = at::globalContext().defaultGenerator(at::kCPU);
    const at::Tensor state = generator.get_state();
    torch::rand({3});
    loss.backward();
    at::Generator(generator).set_state(state);
  });
  expect_equal(drawn, plain);
}

TEST(Checkpoint, OfSemitonesDropoutHasTheSameMaskAgain) {
  const auto gradient = [](bool checkpointed) {
    torch::manual_seed(11);
    const at::Tensor x = torch::ones({1000}).requires_grad_();
    const auto drop = [](const at::Tensor& t) { return fused_dropout(t, 0.5, true) * t; };
    const at::Tensor y = checkpointed ? checkpoint(drop, x) : drop(x);
    y.sum().backward();
    EXPECT_TRUE(torch::equal(x.grad(), 2 * y));
    return x.grad();
  };
  EXPECT_TRUE(torch::equal(gradient(true), gradient(false)));
}

TEST(Checkpoint, RunsInTheRegionsOfTheForwardPass) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    const auto in_region = [&](const Call& call) {
      return step_of([&](const torch::nn::Sequential& block, const at::Tensor& x) {
        const amp::Autocast region(torch::kCPU, dtype);
        return call(block, x);
      });
    };
    const Step plain = in_region(kPlain);
    expect_equal(in_region(kCheckpointed), plain);
    EXPECT_FALSE(torch::equal(plain.loss, step_of(kPlain).loss));
  }
  // A backward pass in a region does not lend it to the function.
  const auto backward_in_region = [](const at::Tensor& loss) {
    const amp::Autocast region(torch::kCPU, torch::kBFloat16);
    loss.backward();
  };
  expect_equal(step_of(kCheckpointed, backward_in_region), step_of(kPlain, backward_in_region));
}

TEST(Checkpoint, RunsInLibTorchsRegionsToo) {
  const auto in_region = [](const Call& call) {
    return step_of([&](const torch::nn::Sequential& block, const at::Tensor& x) {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      const at::Tensor y = call(block, x);
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
      return y;
    });
  };
  const Step plain = in_region(kPlain);
  expect_equal(in_region(kCheckpointed), plain);
  EXPECT_FALSE(torch::equal(plain.loss, step_of(kPlain).loss));
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

// What the policy says of a parameter also holds where the function gets it as an input.
TEST(Checkpoint, KeptParametersMayBeInputs) {
  torch::nn::Linear head(8, 4);
  amp::CastPolicy policy = amp::CastPolicy::semitone({torch::kCPU, torch::kBFloat16});
  policy.keep_fp32_params("weight");
  const amp::CastPolicy bound = policy.bind(*head);
  const auto results = [&](const auto& call, bool transposed) {
    torch::manual_seed(2);
    const at::Tensor x = torch::randn({3, 8}).requires_grad_();
    const at::Tensor y = [&] {
      const amp::Autocast region(bound);
      return call(x, transposed ? head->weight.t() : head->weight);
    }();
    EXPECT_EQ(y.scalar_type(), torch::kFloat);
    head->weight.mutable_grad().reset();
    y.square().sum().backward();
    return std::vector{y.detach(), x.grad(), head->weight.grad().clone()};
  };
  for (const bool transposed : {false, true}) {
    const auto product = [transposed](const at::Tensor& x, const at::Tensor& weight) {
      return transposed ? at::mm(x, weight) : at::linear(x, weight);
    };
    const auto want = results(product, transposed);
    const auto once = [&](const at::Tensor& x, const at::Tensor& weight) {
      return checkpoint(product, x, weight);
    };
    const auto nested = [&](const at::Tensor& x, const at::Tensor& weight) {
      return checkpoint(once, x, weight);
    };
    test::expect_bitwise_equal(results(once, transposed), want);
    test::expect_bitwise_equal(results(nested, transposed), want);
  }
}

// Its cast of the other call has another node in the graph.
TEST(Checkpoint, AWeightMayBeCastOutsideToo) {
  for (const bool libtorchs : {false, true}) {
    const auto gradient = [&](bool checkpointed) {
      torch::manual_seed(5);
      const torch::nn::Linear layer(8, 8);
      const at::Tensor x = torch::randn({4, 8});
      at::Tensor y;
      {
        std::optional<amp::Autocast> region;
        if (libtorchs) at::autocast::set_autocast_enabled(at::kCPU, true);
        if (!libtorchs) region.emplace(torch::kCPU, torch::kBFloat16);
        y = torch::nn::Linear(layer)->forward(x);
        y = checkpointed ? checkpoint(layer, y) : torch::nn::Linear(layer)->forward(y);
        y = torch::nn::Linear(layer)->forward(y);
        if (libtorchs) at::autocast::clear_cache();
        if (libtorchs) at::autocast::set_autocast_enabled(at::kCPU, false);
      }
      y.to(torch::kFloat).square().sum().backward();
      return layer->weight.grad();
    };
    const at::Tensor want = gradient(false);
    const at::Tensor got = gradient(true);
    // The parts of the gradient are rounded to bf16 before or after they are added.
    EXPECT_LT((got - want).norm().item<double>(), 0.01 * want.norm().item<double>());
  }
}

TEST(Checkpoint, KeepsTheInputsOnly) {
  const auto bytes_after_forward = [](const Call& call) {
    const TensorMemoryMeter meter;
    auto blocks = new_blocks();
    at::Tensor y = torch::randn({1000, 32});
    for (auto& block : blocks) y = call(block, y);
    return meter.current_bytes();
  };
  const std::int64_t plain = bytes_after_forward(kPlain);
  const std::int64_t checkpointed = bytes_after_forward(kCheckpointed);
  // Three blocks each keep the results of five layers, or their input.
  EXPECT_LT(checkpointed, plain / 3) << plain;
  EXPECT_GT(checkpointed, 2 * 1000 * 32 * 4);
}

TEST(Checkpoint, CallsMayNest) {
  const auto nested = [](torch::nn::Sequential block, const at::Tensor& x) {
    return checkpoint(
        [block = std::move(block)](const at::Tensor& outer) mutable {
          at::Tensor y = outer;
          for (auto& layer : *block)
            y = checkpoint([&layer](const at::Tensor& inner) { return layer.forward(inner); }, y);
          return y;
        },
        x);
  };
  // The buffers are those of no holder here, so running statistics are updated again.
  Step plain = step_of(kPlain);
  Step got = step_of(nested);
  plain.buffers.clear();
  got.buffers.clear();
  expect_equal(got, plain);
}

TEST(Checkpoint, KeepsTheBuffersThatItIsGiven) {
  const auto with_options = [](torch::nn::Sequential block, const at::Tensor& x) {
    CheckpointOptions options;
    options.buffers(block->buffers());
    return checkpoint(
        options, [block](const at::Tensor& t) mutable { return block->forward(t); }, x);
  };
  expect_equal(step_of(with_options), step_of(kPlain));
}

// As in torch. Which tensors a lambda updates, only its first run shows.
TEST(Checkpoint, ItIsSaidOnceThatBuffersMoveTwice) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process of its own, which said nothing yet
  const auto run = [](bool named) {
    const Step got = step_of([&](torch::nn::Sequential block, const at::Tensor& x) {
      CheckpointOptions options;
      if (named) options.buffers(block->buffers());
      return checkpoint(
          options, [block](const at::Tensor& t) mutable { return block->forward(t); }, x);
    });
    const bool moved_once{test::same_bits(got.buffers, step_of(kPlain).buffers)};
    std::exit(moved_once == named ? 0 : 1);
  };
  EXPECT_EXIT(run(false), testing::ExitedWithCode(0),
              "^[^\n]*move twice. Give CheckpointOptions::buffers[^\n]*\n$");
  EXPECT_EXIT(run(true), testing::ExitedWithCode(0), "^$");
}

// A module's own buffers are kept anyway, and one layer may be there under two names.
TEST(Checkpoint, BuffersMayBeListedTwice) {
  const auto listed_again = [](const torch::nn::Sequential& block, const at::Tensor& x) {
    return checkpoint(CheckpointOptions().buffers(block->buffers()), block, x);
  };
  expect_equal(step_of(listed_again), step_of(kPlain));
}

TEST(Checkpoint, GradientsReachWhatAFunctionCaptures) {
  const auto gradients = [](bool checkpointed) {
    torch::manual_seed(2);
    const at::Tensor leaf = torch::randn({4}).requires_grad_();
    const at::Tensor x = torch::randn({4}).requires_grad_();
    const at::Tensor computed = leaf.exp();
    const auto function = [&](const at::Tensor& t) { return t * computed + leaf * t.sin(); };
    // No input needs a gradient in the second call.
    const auto constant = [&](const at::Tensor& t) { return t * computed; };
    const at::Tensor ones = torch::ones({4});
    const at::Tensor y = checkpointed ? checkpoint(function, x) * checkpoint(constant, ones)
                                      : function(x) * constant(ones);
    (y + computed).sum().backward();
    return std::vector<at::Tensor>{leaf.grad(), x.grad()};
  };
  const auto want = gradients(false);
  const auto got = gradients(true);
  for (std::size_t i = 0; i < want.size(); ++i)
    EXPECT_TRUE(torch::allclose(got[i], want[i], 1e-6, 1e-6)) << i;
}

struct Pair {
  at::Tensor sum;
  std::map<std::string, at::Tensor> products;
  int count = 0;
};

TEST(Checkpoint, InputsAndResultsMayHaveAnyStructure) {
  const auto function = [](const std::vector<at::Tensor>& xs, double factor,
                           const std::pair<at::Tensor, std::string>& named) {
    return Pair{xs[0] + xs[1], {{named.second, xs[0] * named.first * factor}}, 3};
  };
  const at::Tensor a = torch::tensor({1.0, 2.0}).requires_grad_();
  const at::Tensor b = torch::tensor({3.0, 5.0}).requires_grad_();
  const at::Tensor c = torch::tensor({7.0, 11.0});
  const Pair result =
      checkpoint(function, std::vector<at::Tensor>{a, b}, 10.0, std::pair(c, std::string("name")));
  EXPECT_EQ(result.count, 3);
  EXPECT_TRUE(torch::equal(result.sum, torch::tensor({4.0, 7.0})));
  EXPECT_TRUE(torch::equal(result.products.at("name"), torch::tensor({70.0, 220.0})));
  (result.sum.sum() + result.products.at("name").sum()).backward();
  EXPECT_TRUE(torch::equal(a.grad(), torch::tensor({71.0, 111.0})));
  EXPECT_TRUE(torch::equal(b.grad(), torch::tensor({1.0, 1.0})));
  EXPECT_FALSE(c.grad().defined());
}

// Its map_tensors passes on what is defined, as that of a PackedSequence does.
struct Masked {
  template <typename Transform>
  Masked map_tensors(const Transform& transform) const {
    return {transform(values), mask.defined() ? at::Tensor(transform(mask)) : mask};
  }
  at::Tensor values;
  at::Tensor mask;
};

TEST(Checkpoint, InputsMayHaveTensorsThatAreUndefined) {
  const auto function = [](const Masked& x, const std::vector<at::Tensor>& others) {
    const at::Tensor masked = x.mask.defined() ? x.values * x.mask : x.values;
    return (others[0].defined() ? masked * others[0] : masked) - others[1];
  };
  const at::Tensor mask = torch::tensor({0.0, 5.0});
  const at::Tensor factor = torch::tensor({3.0, 7.0});
  for (const bool has_mask : {false, true}) {
    for (const bool has_factor : {false, true}) {
      const at::Tensor x = torch::ones({2}).requires_grad_();
      const at::Tensor last = torch::ones({2}).requires_grad_();
      const Masked masked{x, has_mask ? mask : at::Tensor()};
      const std::vector<at::Tensor> others{has_factor ? factor : at::Tensor(), last};
      const at::Tensor y = checkpoint(function, masked, others);
      EXPECT_TRUE(torch::equal(y, function(masked, others)));
      y.sum().backward();
      const at::Tensor ones = torch::ones({2});
      EXPECT_TRUE(torch::equal(x.grad(), (has_mask ? mask : ones) * (has_factor ? factor : ones)));
      EXPECT_TRUE(torch::equal(last.grad(), -ones));
    }
  }
}

TEST(Checkpoint, InputsMayBePackedSequences) {
  namespace rnn = torch::nn::utils::rnn;
  torch::manual_seed(6);
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(4, 4));
  auto run = [lstm](const rnn::PackedSequence& sequences) mutable {
    return std::get<0>(lstm->forward_with_packed_input(sequences));
  };
  const at::Tensor values = torch::randn({5, 3, 4});
  const auto gradients = [&](bool checkpointed, bool sorted) {
    lstm->zero_grad();
    const at::Tensor x = values.clone().requires_grad_();
    const at::Tensor lengths = torch::tensor({5, sorted ? 4 : 2, sorted ? 2 : 4}, torch::kLong);
    const auto packed = rnn::pack_padded_sequence(x, lengths, /*batch_first=*/false, sorted);
    const rnn::PackedSequence y = checkpointed ? checkpoint(run, packed) : run(packed);
    std::get<0>(rnn::pad_packed_sequence(y)).square().sum().backward();
    std::vector<at::Tensor> found{x.grad()};
    for (const at::Tensor& parameter : lstm->parameters())
      found.push_back(parameter.grad().clone());
    return found;
  };
  for (const bool sorted : {true, false})
    test::expect_bitwise_equal(gradients(true, sorted), gradients(false, sorted));
}

// The order of such a map is that of its history: a rebuilt one has another.
TEST(Checkpoint, TensorsOfUnorderedMapsKeepTheirNames) {
  using Map = std::unordered_map<std::string, at::Tensor>;
  const auto function = [](const Map& xs) {
    return Map{{"sum", xs.at("a") + 2 * xs.at("b") + 3 * xs.at("c")},
               {"product", xs.at("a") * xs.at("b")},
               {"c", xs.at("c") * 4}};
  };
  const auto leaf = [](double value) { return torch::tensor({value}).requires_grad_(); };
  const Map inputs{{"a", leaf(1)}, {"b", leaf(10)}, {"c", leaf(100)}};
  const Map result = checkpoint(function, inputs);
  EXPECT_EQ(result.at("sum").item<double>(), 321);
  EXPECT_EQ(result.at("product").item<double>(), 10);
  EXPECT_EQ(result.at("c").item<double>(), 400);
  (result.at("sum") + 5 * result.at("c")).backward();
  EXPECT_EQ(inputs.at("a").grad().item<double>(), 1);
  EXPECT_EQ(inputs.at("b").grad().item<double>(), 2);
  EXPECT_EQ(inputs.at("c").grad().item<double>(), 23);
}

TEST(Checkpoint, ResultsThatAreNotUsedNeedNoGradient) {
  const at::Tensor x = torch::ones({3}).requires_grad_();
  const auto results =
      checkpoint([](const at::Tensor& t) { return std::tuple(t * 2, t.detach().sum(), t * 3); }, x);
  EXPECT_FALSE(std::get<1>(results).requires_grad());
  std::get<2>(results).sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), torch::full({3}, 3.0)));
}

TEST(Checkpoint, AutogradsOtherFunctionsWork) {
  const at::Tensor weight = torch::tensor({2.0, 3.0}).requires_grad_();
  const at::Tensor x = torch::tensor({5.0, 7.0}).requires_grad_();
  const auto cube = [&](const at::Tensor& t) { return weight * t.pow(3); };
  const at::Tensor y = checkpoint(cube, x).sum();

  // Some inputs only, and again.
  const auto first = torch::autograd::grad({y}, {weight}, {}, /*retain_graph=*/true);
  EXPECT_TRUE(torch::equal(first[0], torch::tensor({125.0, 343.0})));
  EXPECT_FALSE(weight.grad().defined());
  const auto both = torch::autograd::grad({y}, {x, weight}, {}, /*retain_graph=*/true);
  EXPECT_TRUE(torch::equal(both[0], torch::tensor({150.0, 441.0})));
  EXPECT_TRUE(torch::equal(both[1], first[0]));

  const auto recorded = torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true);
  recorded[0].sum().backward();  // 6 w x, and 3 x^2
  EXPECT_TRUE(torch::equal(x.grad(), torch::tensor({60.0, 126.0})));
  EXPECT_TRUE(torch::equal(weight.grad(), torch::tensor({75.0, 147.0})));

  const at::Tensor once = checkpoint(cube, x).sum();
  once.backward();
  EXPECT_THAT(test::message_of<c10::Error>([&] { once.backward(); }),
              HasSubstr("backward through the graph a second time"));
}

TEST(Checkpoint, HooksOnParametersRunOnce) {
  const torch::nn::Linear layer(2, 2);
  int calls = 0;
  layer->weight.register_hook([&](const at::Tensor&) { ++calls; });
  checkpoint(layer, torch::ones({1, 2})).sum().backward();
  EXPECT_EQ(calls, 1);
}

TEST(Checkpoint, WorksWithScaledLossesAndMasterWeights) {
  for (const auto level : {amp::OptLevel::O1, amp::OptLevel::O2}) {
    const auto weights_after = [&](const Call& call) {
      auto blocks = new_blocks();
      torch::nn::ModuleList model;
      for (auto& block : blocks) model->push_back(block.ptr());
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      auto mixed = amp::initialize(model, optimizer, amp::Options(level).dtype(torch::kHalf));
      torch::manual_seed(7);
      for (int i = 0; i < 3; ++i) {
        const at::Tensor x = torch::randn({16, 32});
        const at::Tensor y = mixed.call(
            [&](at::Tensor t) {
              for (auto& block : blocks) t = call(block, t);
              return t;
            },
            x);
        optimizer.zero_grad();
        mixed.scale_loss(y.square().mean(), optimizer).backward();
        mixed.step(optimizer);
      }
      std::vector<at::Tensor> weights;
      for (const at::Tensor& parameter : model->parameters()) weights.push_back(parameter.detach());
      return weights;
    };
    expect_equal(weights_after(kCheckpointed), weights_after(kPlain));
  }
}

TEST(Checkpoint, MayRunBackwardOnAnotherThread) {
  const auto elsewhere = [](const at::Tensor& loss) {
    std::thread([&] { loss.backward(); }).join();
  };
  expect_equal(step_of(kCheckpointed, elsewhere), step_of(kPlain));
}

TEST(Checkpoint, WithoutGradientsIsAPlainCall) {
  const torch::nn::Linear layer(2, 2);
  const at::Tensor x = torch::ones({1, 2}).requires_grad_();
  {
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(checkpoint([](const at::Tensor& t) { return t; }, x).is_same(x));
  }
  const c10::InferenceMode inference;
  EXPECT_TRUE(checkpoint(layer, x).is_inference());
}

TEST(Checkpoint, WithoutPreserveRngStateTheSecondRunDrawsOtherNumbers) {
  const auto is_replayed = [](bool preserve) {
    const at::Tensor x = torch::ones({1000}).requires_grad_();
    const at::Tensor y = checkpoint(
        CheckpointOptions().preserve_rng_state(preserve),
        [](const at::Tensor& t) { return t * torch::rand_like(t); }, x);
    y.sum().backward();
    return torch::equal(x.grad(), y);
  };
  EXPECT_TRUE(is_replayed(true));
  EXPECT_FALSE(is_replayed(false));
}

TEST(Checkpoint, OfWhatNeedsNoGradientHasNone) {
  const at::Tensor y = checkpoint([](const at::Tensor& t) { return t * 2; }, torch::ones({2}));
  EXPECT_FALSE(y.requires_grad());
  EXPECT_TRUE(torch::equal(y, torch::full({2}, 2.0)));
}

TEST(Checkpoint, AResultInTheMemoryOfAnInputIsACopy) {
  const at::Tensor x = torch::ones({4}).requires_grad_();
  const at::Tensor h = x * 3;
  const at::Tensor y = checkpoint([](const at::Tensor& t) { return t.view({2, 2}); }, h);
  y.mul_(5);
  EXPECT_TRUE(torch::equal(h, torch::full({4}, 3.0)));
  (y.sum() + h.sum()).backward();
  EXPECT_TRUE(torch::equal(x.grad(), torch::full({4}, 18.0)));
}

TEST(Checkpoint, WhatChangedMeanwhileIsAnError) {
  torch::nn::Linear layer(2, 2);
  const at::Tensor x = torch::ones({1, 2}).requires_grad_();
  const at::Tensor y = checkpoint(layer, x).sum();
  {
    const torch::NoGradGuard no_grad;
    layer->weight.add_(1);
  }
  EXPECT_THAT(test::error_of([&] { y.backward(); }),
              HasSubstr("parameters that are unchanged between the forward and the backward pass, "
                        "got one of shape [2, 2]"));

  const at::Tensor h = x * 2;
  const at::Tensor z = checkpoint(layer, h).sum();
  h.mul_(2);
  EXPECT_THAT(test::message_of<c10::Error>([&] { z.backward(); }),
              HasSubstr("modified by an inplace operation"));
}

TEST(Checkpoint, AFunctionThatDiffersTheSecondTimeIsAnError) {
  const at::Tensor a = torch::ones({2}).requires_grad_();
  const at::Tensor b = torch::ones({2}).requires_grad_();
  const at::Tensor x = torch::ones({2}).requires_grad_();
  int run = 0;
  const auto error_of = [&](const std::function<at::Tensor(const at::Tensor&)>& function) {
    run = 0;
    const at::Tensor y = checkpoint(function, x).sum();
    return test::error_of([&] { y.backward(); });
  };
  EXPECT_THAT(error_of([&](const at::Tensor& t) { return t * (run++ == 0 ? a : b); }),
              HasSubstr("the same parameters and captured tensors as in the forward pass when the "
                        "function runs again, got others"));
  EXPECT_THAT(error_of([&](const at::Tensor& t) { return run++ == 0 ? t * a : t * a * b; }),
              HasSubstr("got 2 instead of 1"));
  EXPECT_THAT(error_of([&](const at::Tensor& t) { return run++ == 0 ? t * a : (t * a).sum(); }),
              HasSubstr("result 0, float32 [2] as in the forward pass"));
  EXPECT_THAT(error_of([&](const at::Tensor& t) { return run++ == 0 ? t * a : (t * a).detach(); }),
              HasSubstr("float32 [2] without a gradient"));
}

// Of parameters, through what the function has computed from them.
TEST(Checkpoint, GradientsCanBeDifferentiatedAgain) {
  const auto gradients = [](bool checkpointed) {
    torch::manual_seed(1);
    torch::nn::Sequential critic(torch::nn::Linear(3, 5), torch::nn::Tanh(),
                                 torch::nn::Linear(5, 1));
    const at::Tensor weight = torch::full({3}, 0.5).requires_grad_();
    auto score = [critic, weight](const at::Tensor& t) mutable {
      return critic->forward((weight.exp() * t).pow(3));
    };
    const at::Tensor x = torch::randn({4, 3}).requires_grad_();
    const at::Tensor y = checkpointed ? checkpoint(score, x) : score(x);
    const at::Tensor slope = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
    (slope.norm() - 1).square().backward();
    std::vector<at::Tensor> found{weight.grad(), x.grad()};
    for (const at::Tensor& parameter : critic->parameters())
      if (parameter.grad().defined()) found.push_back(parameter.grad());
    return found;
  };
  const auto want = gradients(false);
  const auto got = gradients(true);
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i)
    EXPECT_TRUE(test::near(got[i], want[i], test::reduction_tolerance(torch::kFloat, 64))) << i;
}

struct WithLossImpl : torch::nn::Module {
  WithLossImpl() { layer = register_module("layer", torch::nn::Linear(4, 4)); }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = layer->forward(x);
    loss = h.square().mean();
    return h.tanh();
  }
  torch::nn::Linear layer{nullptr};
  at::Tensor loss;
};
TORCH_MODULE(WithLoss);

TEST(Checkpoint, WhatLeavesTheFunctionAnotherWayHasItsGradient) {
  const auto gradients = [](bool checkpointed) {
    torch::manual_seed(2);
    WithLoss module;
    const at::Tensor x = torch::randn({3, 4}).requires_grad_();
    const at::Tensor h = x * 2;
    const at::Tensor y = checkpointed ? checkpoint(module, h) : module->forward(h);
    (y.sum() + 10 * module->loss).backward();
    return std::vector<at::Tensor>{x.grad(), module->layer->weight.grad()};
  };
  EXPECT_TRUE(
      test::near(gradients(true), gradients(false), test::reduction_tolerance(torch::kFloat, 12)));
}

TEST(Checkpoint, NumbersThatAnotherThreadDrawsAreAnError) {
  const auto run = [](const auto& function, const std::function<void()>& meanwhile) {
    const at::Tensor x = torch::ones({100}).requires_grad_();
    const at::Tensor y = checkpoint(
        [function, meanwhile](const at::Tensor& t) {
          const at::Tensor result = function(t);
          if (meanwhile) std::thread(meanwhile).join();
          return result;
        },
        x);
    y.sum().backward();
    return torch::equal(x.grad() * x, y);
  };
  int calls = 0;
  const auto draw_once = [&calls] {
    if (calls++ == 0) torch::rand({3});
  };
  const auto random = [](const at::Tensor& t) { return t * torch::rand_like(t); };
  EXPECT_TRUE(run(random, {}));
  EXPECT_THAT(test::error_of([&] { run(random, draw_once); }),
              HasSubstr("the random numbers of the forward pass when the function runs again"));

  // A function that draws none does not disturb other threads.
  torch::manual_seed(4);
  const at::Tensor first = torch::rand({2});
  const at::Tensor second = torch::rand({2});
  torch::manual_seed(4);
  EXPECT_TRUE(run([](const at::Tensor& t) { return t * 2; }, {}));
  EXPECT_TRUE(torch::equal(torch::rand({2}), first));
  EXPECT_TRUE(torch::equal(torch::rand({2}), second));
  calls = 0;
  const auto evaluated = [](const at::Tensor& t) {
    return torch::dropout(t, 0.5, /*train=*/false) * 2;
  };
  EXPECT_NO_THROW(run(evaluated, [&calls] {
    if (calls++ == 1) torch::rand({3});  // in the second run
  }));
}

// As to drop the same elements in several layers.
TEST(Checkpoint, AFunctionMayPutTheGeneratorBack) {
  for (const bool fused : {false, true}) {
    const auto locked = [fused](const at::Tensor& t) {
      at::Generator generator = at::detail::getDefaultCPUGenerator();
      const at::Tensor state = generator.get_state();
      at::Tensor result = fused ? fused_dropout(t, 0.5) : torch::dropout(t, 0.5, /*train=*/true);
      generator.set_state(state);
      return result;
    };
    const at::Tensor x = torch::ones({100}).requires_grad_();
    const at::Tensor y = checkpoint(locked, x);
    torch::rand({3});
    y.sum().backward();
    EXPECT_TRUE(torch::equal(x.grad() * x, y)) << fused;
  }
}

struct ShiftedImpl : torch::nn::Module {
  ShiftedImpl() {
    layer = register_module("layer", torch::nn::Linear(8, 8));
    shift = register_buffer("shift", torch::ones({1}).expand({8}));
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(layer(x) + shift); }
  torch::nn::Linear layer{nullptr};
  at::Tensor shift;
};
TORCH_MODULE(Shifted);

TEST(Checkpoint, BuffersMayBeExpanded) {
  torch::manual_seed(3);
  Shifted block;
  const auto gradient = [&](bool checkpointed) {
    const at::Tensor x = torch::ones({2, 8}).requires_grad_();
    (checkpointed ? checkpoint(block, x) : block(x)).sum().backward();
    return x.grad();
  };
  test::expect_bitwise_equal(gradient(true), gradient(false));
}

// Their nodes are made anew, in the first run only.
TEST(Checkpoint, CapturedViewsMayBeOlderThanTheirBases) {
  const auto results = [](bool checkpointed) {
    torch::manual_seed(3);
    torch::nn::Linear head(torch::nn::LinearOptions(4, 4).bias(false));
    const at::Tensor transposed = head->weight.t();
    const auto call = [&](const auto& function, const at::Tensor& t) {
      return checkpointed ? checkpoint(function, t) : function(t);
    };
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = torch::ones({2, 4}).requires_grad_();
      call([transposed](const at::Tensor& t) { return torch::tanh(t.mm(transposed)); }, x)
          .sum()
          .backward();
      const torch::NoGradGuard no_grad;
      head->weight.sub_(head->weight.grad());
    }
    const at::Tensor leaf = torch::ones({2, 8}).requires_grad_();
    const at::Tensor hidden = leaf * 2;
    const at::Tensor gate = hidden.narrow(1, 0, 4);
    hidden.mul_(0.5);
    const at::Tensor z = torch::ones({2, 4}).requires_grad_();
    call([gate](const at::Tensor& t) { return torch::tanh(t * gate); }, z).sum().backward();
    return std::vector<at::Tensor>{head->weight.detach(), leaf.grad(), z.grad()};
  };
  test::expect_bitwise_equal(results(true), results(false));
}

TEST(Checkpoint, HasForwardDerivativesOfInputs) {
  torch::manual_seed(3);
  torch::nn::Linear layer(8, 8);
  auto block = [layer](const at::Tensor& t) mutable { return torch::tanh(layer->forward(t)); };
  const at::Tensor x = torch::randn({2, 8});
  const at::Tensor v = torch::randn({2, 8});
  const auto level = torch::autograd::ForwardADLevel::get_next_idx();
  {
    const at::Tensor dual = at::_make_dual(x, v, static_cast<std::int64_t>(level));
    const auto tangent = [&](const at::Tensor& of) {
      return std::get<1>(at::_unpack_dual(of, static_cast<std::int64_t>(level)));
    };
    const at::Tensor got = tangent(checkpoint(block, dual));
    ASSERT_TRUE(got.defined());
    test::expect_bitwise_equal(got.detach(), tangent(block(dual)).detach());
    const at::Tensor y = x.clone().requires_grad_();
    EXPECT_THAT(
        test::error_of([&] { checkpoint([dual](const at::Tensor& t) { return t * dual; }, y); }),
        HasSubstr("forward-mode derivatives of inputs, got those of a captured tensor"));
  }
  torch::autograd::ForwardADLevel::release_idx(level);
}

struct PowerIterationImpl : torch::nn::Module {
  PowerIterationImpl() {
    weight = register_parameter("weight", torch::randn({6, 6}));
    vector = register_buffer("vector", torch::randn({6}));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor left;
    {
      const torch::NoGradGuard no_grad;
      left = weight.t().mv(vector);
      const at::Tensor right = weight.mv(left);
      vector.copy_(right / right.norm());
    }
    return x.mm((weight / vector.clone().dot(weight.mv(left))).t());
  }
  at::Tensor weight;
  at::Tensor vector;
};
TORCH_MODULE(PowerIteration);

TEST(Checkpoint, TheSecondRunReadsTheBuffersOfTheFirst) {
  const auto results = [](bool checkpointed) {
    torch::manual_seed(4);
    PowerIteration module;
    const at::Tensor x = torch::randn({3, 6}).requires_grad_();
    const at::Tensor y = checkpointed ? checkpoint(module, x) : module->forward(x);
    const at::Tensor again = module->forward(x.detach()).detach();  // and updates the buffer
    y.square().sum().backward();
    return std::vector<at::Tensor>{x.grad(), module->weight.grad(), module->vector.clone(), again};
  };
  test::expect_bitwise_equal(results(true), results(false));
}

// The graph has saved the buffer itself.
struct ScaleByBufferImpl : torch::nn::Module {
  explicit ScaleByBufferImpl(bool counted = false) : counts(counted) {
    scale = register_buffer("scale", torch::ones({1}));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (counts) scale.add_(1);
    return x * scale;
  }
  at::Tensor scale;
  bool counts;
};
TORCH_MODULE(ScaleByBuffer);

TEST(Checkpoint, TheGradientOfTheSecondRunReadsItsBuffersToo) {
  const at::Tensor x = torch::ones({3}).requires_grad_();
  ScaleByBuffer set;
  set->scale.fill_(2);
  const at::Tensor y = checkpoint(set, x);
  set->scale.fill_(3);
  y.sum().backward();
  test::expect_bitwise_equal(x.grad(), torch::full({3}, 2.0F));
  test::expect_bitwise_equal(set->scale, torch::full({1}, 3.0F));

  x.mutable_grad().reset();
  ScaleByBuffer counted(true);
  const at::Tensor first = checkpoint(counted, x);
  const at::Tensor second = checkpoint(counted, x);
  (first + 10 * second).sum().backward();
  test::expect_bitwise_equal(x.grad(), torch::full({3}, 2.0F + 10 * 3.0F));
  test::expect_bitwise_equal(counted->scale, torch::full({1}, 3.0F));
}

struct OuterOfScaleImpl : torch::nn::Module {
  OuterOfScaleImpl() { register_module("inner", inner); }
  at::Tensor forward(const at::Tensor& x) { return checkpoint(inner, x * 3) * inner->scale; }
  ScaleByBuffer inner{true};
};
TORCH_MODULE(OuterOfScale);

// The inner run's writes are not those of a hook.
TEST(Checkpoint, BuffersOfNestedCallsAreAsAfterTheForwardPass) {
  const auto results = [](bool checkpointed) {
    OuterOfScale outer;
    const at::Tensor x = torch::ones({3}).requires_grad_();
    std::vector<at::Tensor> gradients;
    at::Tensor loss = torch::zeros({});
    for (int i = 1; i < 3; ++i) {
      const at::Tensor y = checkpointed ? checkpoint(outer, x) : outer->forward(x);
      if (checkpointed) {
        loss = loss + i * y.sum();
      } else {  // the next call writes to what this one has saved
        gradients.push_back(i * torch::autograd::grad({y.sum()}, {x})[0]);
      }
    }
    if (checkpointed) gradients = torch::autograd::grad({loss}, {x});
    const at::Tensor sum = torch::stack(gradients).sum(0);
    return std::vector<at::Tensor>{sum, outer->inner->scale.clone()};
  };
  test::expect_bitwise_equal(results(true), results(false));
}

TEST(Checkpoint, WhatAHookWritesToABufferStays) {
  ScaleByBuffer module;
  const auto run = [&](const at::Tensor& x) {
    if (x.requires_grad()) x.register_hook([&](const at::Tensor&) { module->scale.fill_(7); });
    return module->forward(x);
  };
  const at::Tensor x = torch::ones({3}).requires_grad_();
  const at::Tensor y = checkpoint(CheckpointOptions().buffers({module->scale}), run, x);
  module->scale.fill_(3);
  y.sum().backward();
  test::expect_bitwise_equal(module->scale, torch::full({1}, 7.0F));
}

// So large that no copy of what the first run only reads is kept.
struct WithQueueImpl : torch::nn::Module {
  WithQueueImpl() { queue = register_buffer("queue", torch::randn({64, 2048})); }
  at::Tensor forward(const at::Tensor& x) { return x.mm(queue.clone()).logsumexp(1); }
  at::Tensor queue;
};
TORCH_MODULE(WithQueue);

TEST(Checkpoint, ALargeBufferThatChangesIsAnError) {
  torch::manual_seed(4);
  WithQueue module;
  const at::Tensor values = torch::randn({3, 64});
  const auto gradient = [&](bool checkpointed, const std::function<void()>& meanwhile) {
    const at::Tensor x = values.clone().requires_grad_();
    const at::Tensor y = checkpointed ? checkpoint(module, x) : module->forward(x);
    meanwhile();
    y.sum().backward();
    return x.grad();
  };
  const auto enqueue = [&] {
    const torch::NoGradGuard no_grad;
    module->queue.slice(1, 0, 32).normal_();
  };
  const auto nothing = [] {};
  test::expect_bitwise_equal(gradient(true, nothing), gradient(false, nothing));
  EXPECT_THAT(test::error_of([&] { gradient(true, enqueue); }),
              HasSubstr("expected buffers that are unchanged between the forward and the backward "
                        "pass, got one of shape [64, 2048]"));
  // Through data(), which no version counter sees.
  EXPECT_THAT(test::error_of([&] { gradient(true, [&] { module->queue.data().mul_(2); }); }),
              HasSubstr("expected buffers that are unchanged"));
}

// Each run writes the value that is there: one call's second run must not stop the other call's.
TEST(Checkpoint, ALargeBufferMayBeWrittenToWithoutAChange) {
  WithQueue module;
  const auto run = [module](const at::Tensor& t) mutable {
    const torch::NoGradGuard no_grad;
    module->queue.mul_(1);
    const at::AutoGradMode recording(true);
    return module->forward(t);
  };
  const at::Tensor x = torch::randn({3, 64}).requires_grad_();
  const auto options = CheckpointOptions().buffers(module->buffers());
  const at::Tensor y = checkpoint(options, run, x);
  EXPECT_NO_THROW((y + checkpoint(options, run, x)).sum().backward());
}

TEST(Checkpoint, AnotherModeIsAnError) {
  torch::nn::Sequential block(torch::nn::Linear(2, 2), torch::nn::BatchNorm1d(2));
  const at::Tensor y = checkpoint(block, torch::randn({4, 2})).sum();
  block->eval();
  EXPECT_THAT(test::error_of([&] { y.backward(); }),
              HasSubstr("call train() and eval() after backward()"));
}

TEST(Checkpoint, ResultsThatShareMemoryAreSeparate) {
  const at::Tensor x = torch::ones({4}).requires_grad_();
  const at::Tensor captured = x * 2;
  const auto results = checkpoint(
      [captured](const at::Tensor& t) {
        const at::Tensor h = t * 3;
        return std::tuple(h, h, h.view({2, 2}), captured.view({2, 2}));
      },
      x);
  EXPECT_TRUE(std::get<0>(results).is_same(std::get<1>(results)));
  std::get<0>(results).mul_(5);  // 15 x, also in the second one
  std::get<3>(results).mul_(7);  // 14 x
  EXPECT_TRUE(torch::equal(std::get<2>(results), torch::full({2, 2}, 3.0)));
  EXPECT_TRUE(torch::equal(captured, torch::full({4}, 2.0)));
  (std::get<1>(results).sum() + std::get<2>(results).sum() + std::get<3>(results).sum() +
   captured.sum())
      .backward();
  EXPECT_TRUE(torch::equal(x.grad(), torch::full({4}, 15.0 + 3 + 14 + 2)));
}

TEST(Checkpoint, AFunctionMayMakeLeavesOfItsOwn) {
  torch::manual_seed(6);
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(4, 4));
  auto run = [lstm](const at::Tensor& t) mutable {
    const at::Tensor hidden = torch::zeros({1, 2, 4}).requires_grad_();
    const at::Tensor cell = torch::zeros({1, 2, 4}).requires_grad_();
    return std::get<0>(lstm->forward(t, std::tuple(hidden, cell)));
  };
  const at::Tensor values = torch::randn({5, 2, 4});
  const auto gradient = [&](bool checkpointed) {
    const at::Tensor x = values.clone().requires_grad_();
    (checkpointed ? checkpoint(run, x) : run(x)).sum().backward();
    return x.grad();
  };
  test::expect_bitwise_equal(gradient(true), gradient(false));
}

// LibTorch's SGD writes through data(), which no version counter sees.
TEST(Checkpoint, AStepBeforeTheBackwardPassIsAnError) {
  torch::nn::Linear layer(2, 2);
  torch::optim::SGD optimizer(layer->parameters(), 0.1);
  layer->forward(torch::ones({1, 2})).sum().backward();
  const at::Tensor y = checkpoint(layer, torch::ones({1, 2}).requires_grad_()).sum();
  optimizer.step();
  EXPECT_THAT(test::error_of([&] { y.backward(); }),
              HasSubstr("call backward() before the optimizer's step"));
}

TEST(Checkpoint, CapturedTensorsThatChangeAreAnError) {
  const at::Tensor x = torch::ones({2}).requires_grad_();
  for (const bool nested : {false, true}) {
    for (const bool computed : {false, true}) {
      const at::Tensor leaf = torch::full({2}, 3.0).requires_grad_();
      const at::Tensor factor = computed ? leaf * 1 : torch::full({2}, 3.0);
      const auto scale = [factor](const at::Tensor& t) { return torch::tanh(t * factor); };
      const auto call = [scale, nested](const at::Tensor& t) {
        return nested ? checkpoint(scale, t) : scale(t);
      };
      const at::Tensor y = checkpoint(call, x).sum();
      const at::Tensor z = checkpoint(call, x).sum();
      EXPECT_NO_THROW(z.backward());
      {
        const torch::NoGradGuard no_grad;
        factor.mul_(2);
      }
      EXPECT_THAT(test::error_of([&] { y.backward(); }),
                  HasSubstr("captured tensors that are unchanged between the forward and the "
                            "backward pass, got one of shape [2]"));
    }
  }
}

// As programs do that keep a share of each weight.
TEST(Checkpoint, ACapturedTensorWhoseMemoryWasFreedIsAnError) {
  const at::Tensor x = torch::ones({2}).requires_grad_();
  const at::Tensor factor = torch::full({2}, 3.0);
  const at::Tensor y =
      checkpoint([factor](const at::Tensor& t) { return torch::tanh(t * factor); }, x).sum();
  factor.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr());
  EXPECT_THAT(test::error_of([&] { y.backward(); }), HasSubstr("captured tensors"));
}

// No operator of LibTorch gets the tensors that a kernel of Semitone's reads, or one returns what it
// got.
TEST(Checkpoint, CapturedTensorsThatKernelsReadAreWatchedToo) {
  using Function = std::function<at::Tensor(const at::Tensor& t, const at::Tensor& captured)>;
  torch::manual_seed(3);
  FusedBatchNorm norm(FusedBatchNormOptions(4));
  const std::vector<std::pair<Function, at::Tensor>> calls{
      {[](const auto& t, const auto& r) { return fused_dropout_add(t, r, 0.1); },
       torch::randn({8, 4})},
      {[](const auto& t, const auto& r) { return t * fused_gelu(r); }, torch::randn({8, 4})},
      {[](const auto& t, const auto& w) { return fused_layer_norm(t, {4}, w); }, torch::randn({4})},
      {[norm](const auto& t, const auto& r) mutable { return norm->forward(t, r); },
       torch::randn({8, 4})},
      {[](const auto& t, const auto& classes) { return fused_cross_entropy(t, classes); },
       torch::ones({8}, torch::kLong)},
      {[](const auto& t, const auto& r) { return t * r.to(torch::kFloat); }, torch::randn({8, 4})}};
  const at::Tensor x = torch::randn({8, 4}).requires_grad_();
  for (std::size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE(i);
    const auto& [function, captured] = calls[i];
    const auto bound = [f = function, c = captured](const at::Tensor& t) { return f(t, c); };
    const at::Tensor y = checkpoint(bound, x).sum();
    const at::Tensor z = checkpoint(bound, x).sum();
    EXPECT_NO_THROW(z.backward());
    captured.mul_(2);
    EXPECT_THAT(test::error_of([&] { y.backward(); }),
                HasSubstr("captured tensors that are unchanged between the forward and the "
                          "backward pass, got one of shape"));
  }
}

TEST(Checkpoint, TakesModulesInAnyHolder) {
  torch::nn::Sequential layers(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3));
  const at::Tensor x = torch::randn({4, 2});
  at::Tensor y = x;
  for (torch::nn::AnyModule& layer : *layers) y = checkpoint(layer, y);
  y.square().sum().backward();
  EXPECT_TRUE(layers->parameters()[0].grad().defined());
  EXPECT_EQ(layers->named_buffers()["1.num_batches_tracked"].item<std::int64_t>(), 1);
  const std::shared_ptr<torch::nn::SequentialImpl> shared = layers.ptr();
  EXPECT_TRUE(torch::equal(checkpoint(shared, x), layers->forward(x)));
}

TEST(Checkpoint, TakesInputsOfAnyKind) {
  const at::Tensor inference = [] {
    const c10::InferenceMode guard;
    return torch::ones({2});
  }();
  EXPECT_TRUE(torch::equal(checkpoint([](const at::Tensor& t) { return t * 2; }, inference),
                           torch::full({2}, 2.0)));
  const at::Tensor meta = torch::ones({2}, torch::kMeta).requires_grad_();
  EXPECT_TRUE(checkpoint([](const at::Tensor& t) { return t * 2; }, meta).is_meta());
  const at::Tensor sparse = torch::eye(2).to_sparse().requires_grad_();
  const at::Tensor y = checkpoint(
      [](const at::Tensor& t) { return at::_sparse_mm(t, torch::ones({2, 2})); }, sparse);
  const at::Tensor grad = torch::autograd::grad({y.sum()}, {sparse}, {}, true, true)[0];
  EXPECT_TRUE(torch::equal(grad.to_dense(), torch::full({2, 2}, 2.0).mul(torch::eye(2))));

  const at::Tensor late = torch::ones({2});
  const at::Tensor weight = torch::ones({2}).requires_grad_();
  const at::Tensor z = checkpoint([weight](const at::Tensor& t) { return t * weight; }, late).sum();
  const_cast<at::Tensor&>(late).requires_grad_();
  z.backward();
  EXPECT_TRUE(torch::equal(weight.grad(), torch::ones({2})));
  EXPECT_FALSE(late.grad().defined());
}

TEST(Checkpoint, ALongChainOfCallsIsFreedWithoutRecursion) {
  at::Tensor y = torch::ones({1}).requires_grad_();
  for (int i = 0; i < 30'000; ++i)
    y = checkpoint([y](const at::Tensor& t) { return y * t; }, torch::ones({1}));
  EXPECT_EQ(y.item<float>(), 1);
}

TEST(Checkpoint, LeavesLibTorchsRegionsAsTheyWere) {
  const auto before = at::autocast::get_autocast_dtype(at::kCPU);
  const at::Tensor x = torch::ones({2, 2}).requires_grad_();
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, torch::kHalf);
  const at::Tensor y = checkpoint(torch::nn::Linear(2, 2), x);
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::set_autocast_dtype(at::kCPU, before);
  y.to(torch::kFloat).sum().backward();
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), before);
}

TEST(Checkpoint, AnExceptionOfTheFunctionLeavesNothingBehind) {
  const at::Tensor x = torch::ones({2}).requires_grad_();
  const auto fail = [](const at::Tensor& t) -> at::Tensor {
    if (t.defined()) throw std::runtime_error("no");
    return t;
  };
  const amp::Autocast region(torch::kCPU, torch::kBFloat16);
  EXPECT_THROW(checkpoint(fail, x), std::runtime_error);
  EXPECT_TRUE(amp::autocast_enabled(torch::kCPU));
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  const at::Tensor y = checkpoint(torch::nn::Linear(2, 2), x);
  EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
}

}  // namespace
}  // namespace semitone::nn::checkpoint_test
