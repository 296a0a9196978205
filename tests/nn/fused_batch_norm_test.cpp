#include "semitone/nn/fused_batch_norm.h"

#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <sstream>
#include <vector>

namespace semitone::nn::fused_batch_norm_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_close;

constexpr std::int64_t kChannels = 6;
// The values of one channel's statistics.
constexpr std::int64_t kValues = 5 * 7 * 9;

at::Tensor images(c10::ScalarType dtype) {
  return torch::randn({5, kChannels, 7, 9})
      .mul(2)
      .add(1)
      .to(dtype)
      .contiguous(at::MemoryFormat::ChannelsLast)
      .requires_grad_();
}

void randomize(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : module.parameters()) parameter.uniform_(0.5, 1.5);
}

template <typename From, typename To>
void copy_state(From& from, To& to) {
  std::stringstream stream;
  torch::save(from, stream);
  torch::load(to, stream);
}

// A layer's result, and the gradients of its input, residual, weight and bias for a gradient.
template <typename Result>
std::vector<at::Tensor> gradients(const Result& result, const std::vector<at::Tensor>& of,
                                  const at::Tensor& grad) {
  return torch::autograd::grad({result}, of, {grad}, /*retain_graph=*/true);
}

TEST(FusedBatchNorm, IsBatchNormAdditionAndReLU) {
  torch::manual_seed(0);
  for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16}) {
    SCOPED_TRACE(dtype);
    FusedBatchNorm fused(FusedBatchNormOptions(kChannels).relu(true));
    randomize(*fused);
    torch::nn::BatchNorm2d plain(kChannels);
    copy_state(fused, plain);
    if (dtype == torch::kDouble) {
      fused->to(dtype);
      plain->to(dtype);
    }
    const at::Tensor input = images(dtype);
    const at::Tensor residual = images(dtype);
    const at::Tensor grad = torch::randn_like(input);
    const at::Tensor got = fused(input, residual);
    // The reference in fp32 or wider, rounded where Semitone's is.
    const auto exact = at::promote_types(dtype, torch::kFloat);
    const at::Tensor want = (plain(input.to(exact)) + residual.to(exact)).relu().to(dtype);
    expect_close(got, want, test::pointwise_tolerance(dtype));
    EXPECT_EQ(got.strides(), input.strides());

    const double tolerance = test::reduction_tolerance(dtype, kValues);
    const auto got_grads = gradients(got, {input, residual, fused->weight, fused->bias}, grad);
    const auto want_grads = gradients(want, {input, residual, plain->weight, plain->bias}, grad);
    for (std::size_t i = 0; i < want_grads.size(); ++i)
      expect_close(got_grads[i], want_grads[i], tolerance);
    const double statistics = test::reduction_tolerance(torch::kFloat, kValues);
    expect_close(fused->running_mean, plain->running_mean, statistics);
    expect_close(fused->running_var, plain->running_var, statistics);
    EXPECT_EQ(fused->num_batches_tracked.item<std::int64_t>(), 1);
  }
}

// Whether relu stopped an element is computed again from the input, or read from the result: sums of
// ones count the positive results exactly.
TEST(FusedBatchNorm, GradientsPassWhereTheResultIsPositive) {
  torch::manual_seed(3);
  for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kHalf, torch::kBFloat16}) {
    for (const bool with_residual : {false, true}) {
      FusedBatchNorm layer(FusedBatchNormOptions(kChannels).relu(true));
      if (dtype == torch::kDouble) layer->to(dtype);
      const at::Tensor input = images(dtype);
      const at::Tensor residual = with_residual ? images(dtype) : at::Tensor();
      const at::Tensor output = layer(input, residual);
      // In the layout of the result, and in another one.
      for (const at::Tensor& grad :
           {torch::ones_like(output), torch::ones({1}, output.options()).expand_as(output)}) {
        layer->zero_grad();
        if (with_residual) residual.mutable_grad() = at::Tensor();
        output.backward(grad, /*retain_graph=*/true);
        const at::Tensor positive = output.detach().gt(0);
        expect_close(layer->bias.grad(), positive.to(layer->bias.dtype()).sum({0, 2, 3}), 0);
        if (with_residual) expect_close(residual.grad(), positive.to(dtype), 0);
      }
    }
  }
}

TEST(FusedBatchNorm, InEvaluationUsesTheRunningStatistics) {
  torch::manual_seed(1);
  FusedBatchNorm fused(FusedBatchNormOptions(kChannels).relu(true));
  randomize(*fused);
  fused(images(torch::kFloat));
  torch::nn::BatchNorm2d plain(kChannels);
  copy_state(fused, plain);
  fused->eval();
  plain->eval();
  const at::Tensor input = images(torch::kFloat);
  const at::Tensor residual = images(torch::kFloat);
  expect_bitwise_equal(fused(input, residual), (plain(input) + residual).relu());
}

TEST(FusedBatchNorm, HasTheInputsDtypeInBothModesAlsoWithAWiderResidual) {
  FusedBatchNorm fused(kChannels);
  for (const bool training : {true, false}) {
    fused->train(training);
    EXPECT_EQ(fused(images(torch::kBFloat16), images(torch::kFloat)).scalar_type(),
              torch::kBFloat16);
  }
}

TEST(FusedBatchNorm, CanBeDifferentiatedAgain) {
  torch::manual_seed(2);
  const auto second = [](auto& layer, const auto& forward) {
    torch::manual_seed(3);
    const at::Tensor input = images(torch::kDouble);
    const at::Tensor residual = images(torch::kDouble);
    const at::Tensor result = forward(layer, input, residual);
    const auto first = torch::autograd::grad({result.pow(4).sum()}, {input}, {}, true,
                                             /*create_graph=*/true);
    return torch::autograd::grad({first[0].square().sum()},
                                 {input, residual, layer->weight, layer->bias});
  };
  FusedBatchNorm fused(FusedBatchNormOptions(kChannels).relu(true));
  randomize(*fused);
  fused->to(torch::kDouble);
  torch::nn::BatchNorm2d plain(kChannels);
  plain->to(torch::kDouble);
  copy_state(fused, plain);
  const auto got = second(fused, [](auto& layer, const at::Tensor& x, const at::Tensor& residual) {
    return layer(x, residual);
  });
  const auto want = second(plain, [](auto& layer, const at::Tensor& x, const at::Tensor& residual) {
    return (layer(x) + residual).relu();
  });
  for (std::size_t i = 0; i < want.size(); ++i) expect_close(got[i], want[i], 1e-10);
}

TEST(FusedBatchNorm, WithoutMomentumAveragesAllBatches) {
  FusedBatchNorm layer(FusedBatchNormOptions(2).momentum(std::nullopt));
  layer(torch::tensor({{0.0F, 2.0F}, {2.0F, 2.0F}}));
  layer(torch::tensor({{4.0F, 2.0F}, {6.0F, 2.0F}}));
  expect_bitwise_equal(layer->running_mean, torch::tensor({3.0F, 2.0F}));
}

// LibTorch's operator saves the statistics that it reads, and gives them no new version.
TEST(FusedBatchNorm, DoesNotDisturbEarlierCallsInTheGraph) {
  torch::manual_seed(0);
  FusedBatchNorm layer(kChannels);
  const at::Tensor input = images(torch::kFloat);
  const auto version = layer->running_mean._version();
  layer->eval();
  const at::Tensor evaluated = layer(input);
  layer->train();
  const at::Tensor before = layer->running_var.clone();
  const at::Tensor trained = layer(images(torch::kFloat));
  EXPECT_FALSE(at::equal(layer->running_var, before));
  EXPECT_EQ(layer->running_mean._version(), version);
  (evaluated.sum() + trained.sum()).backward();
  EXPECT_TRUE(input.grad().isfinite().all().item<bool>());
}

TEST(FusedBatchNorm, TakesTheSameDtypesInTrainingAndEvaluation) {
  torch::manual_seed(0);
  const auto dtypes = {torch::kDouble, torch::kFloat, torch::kHalf, torch::kBFloat16};
  for (const auto of_input : dtypes) {
    for (const auto of_layer : dtypes) {
      SCOPED_TRACE(testing::Message() << of_input << " and " << of_layer);
      FusedBatchNorm layer(kChannels);
      randomize(*layer);
      layer->to(of_layer);
      FusedBatchNorm exact(kChannels);
      exact->to(torch::kDouble);
      {
        const torch::NoGradGuard no_grad;
        exact->weight.copy_(layer->weight);
        exact->bias.copy_(layer->bias);
      }
      const at::Tensor input = images(of_input).detach();
      for (const bool training : {true, false}) {
        layer->train(training);
        exact->train(training);
        const at::Tensor got = layer(input);
        EXPECT_EQ(got.scalar_type(), of_input);
        const auto coarse = test::is_16_bits(of_input) ? of_input : torch::kFloat;
        // Statistics of 16 bits are rounded after the training step.
        const double tolerance =
            training ? test::pointwise_tolerance(coarse)
                     : test::reduction_tolerance(of_layer, 1) + test::pointwise_tolerance(coarse);
        expect_close(got.to(torch::kDouble), exact(input.to(torch::kDouble)), tolerance);
      }
    }
  }
}

TEST(FusedBatchNorm, RefusesInputsThatDoNotFit) {
  FusedBatchNorm layer(FusedBatchNormOptions(3));
  test::expect_error([&] { layer(torch::ones({2, 4})); }, {"[nn.fused_batch_norm]", "(N, 3, ...)"});
  test::expect_error([&] { layer(torch::ones({3})); }, {"(N, 3, ...)"});
  test::expect_error([&] { layer(torch::ones({1, 3})); }, {"more than 1 value a channel"});
  test::expect_error([&] { layer(torch::ones({2, 3}), torch::ones({3, 3})); }, {"residual"});
  test::expect_error([&] { layer(torch::ones({2, 3}, torch::kLong)); }, {"floating-point input"});
}

TEST(FusedBatchNorm, RefusesAnInputOnAnotherDevice) {
  FusedBatchNorm layer(FusedBatchNormOptions(3));
  layer->weight = torch::ones({3}, torch::kMeta);
  test::expect_error([&] { layer(torch::ones({2, 3})); },
                     {"parameters and buffers on cpu", "one on meta"});
}

TEST(FusedBatchNorm, SaysWhatItIs) {
  std::ostringstream stream;
  FusedBatchNorm(FusedBatchNormOptions(8).relu(true))->pretty_print(stream);
  EXPECT_EQ(stream.str(),
            "semitone::nn::FusedBatchNorm(8, eps=1e-05, momentum=0.1, affine=true, "
            "track_running_stats=true, relu=true)");
}

}  // namespace
}  // namespace semitone::nn::fused_batch_norm_test
