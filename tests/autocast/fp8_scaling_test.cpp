// Scales of fp8 from step to step: against a plain loop over amaxes, saved, and refused.

#include "semitone/autocast/autocast.h"
#include "semitone/core/error.h"
#include "tests/autocast/fp8_fixture.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <sstream>
#include <utility>
#include <vector>

namespace semitone::amp::fp8_test {
namespace {

using test::error_of;
using test::expect_bitwise_equal;
using testing::HasSubstr;

// Scales of 50 steps against a plain loop over the amaxes of tensors.
TEST_F(Fp8, ScalesAreThoseOfTheStepsBefore) {
  for (const std::int64_t history : {1, 4, 100}) {
    SCOPED_TRACE(history);
    torch::nn::Linear layer(torch::nn::LinearOptions(8, 8).bias(false));
    const CastPolicy policy =
        fp8_policy(*layer, Fp8Options().amax_history(history).margin(2), torch::kHalf);
    Fp8Scaling scaling = policy.fp8_scaling();
    std::vector<double> inputs;
    std::vector<double> gradients;
    float of_inputs = 0;
    float of_gradients = 0;
    for (int step = 0; step < 50; ++step) {
      ASSERT_EQ(scaling.scales().at(0).input_scale, of_inputs) << step;
      ASSERT_EQ(scaling.scales().at(0).grad_output_scale, of_gradients) << step;
      double of_step = 0;
      double of_gradient = 0;
      // Two batches, as in gradient accumulation; in some steps the layer does not run, or gets 0.
      for (int batch = 0; batch < 2 && step % 7 != 3; ++batch) {
        const at::Tensor input = torch::randn({4, 8}) * std::ldexp(1.0, step % 9) * (step % 5 != 4);
        const at::Tensor result = [&] {
          const Autocast region(policy);
          return layer->forward(input);
        }();
        const at::Tensor gradient = torch::randn({4, 8}).to(torch::kHalf);
        result.backward(gradient);
        of_step = std::max(of_step, amax_of(input));
        of_gradient = std::max(of_gradient, amax_of(gradient));
      }
      scaling.update();
      inputs.push_back(of_step);
      gradients.push_back(of_gradient);
      const auto largest = [&](const std::vector<double>& amaxes) {
        const auto first = amaxes.size() > static_cast<std::size_t>(history)
                               ? amaxes.end() - history
                               : amaxes.begin();
        return *std::max_element(first, amaxes.end());
      };
      if (largest(inputs) > 0) of_inputs = scale_of(largest(inputs), kE4m3) / 4;
      if (largest(gradients) > 0) of_gradients = scale_of(largest(gradients), kE5m2) / 4;
    }
  }
}

TEST_F(Fp8, ValuesBeyondTheHistoryAreLimited) {
  torch::nn::Linear layer(torch::nn::LinearOptions(4, 4).bias(false));
  torch::nn::init::eye_(layer->weight);
  const CastPolicy policy = fp8_policy(*layer);
  const auto forward = [&](float value) {
    const Autocast region(policy);
    return layer->forward(torch::full({1, 4}, value))[0][0].item<float>();
  };
  EXPECT_EQ(forward(2), 2);
  policy.fp8_scaling().update();
  EXPECT_EQ(forward(1), 1);
  EXPECT_EQ(forward(100), 2);  // delayed scaling: the largest that the scale allows
  policy.fp8_scaling().update();
  EXPECT_EQ(forward(100), 100);
}

TEST_F(Fp8, EvaluationDoesNotChangeTheScales) {
  torch::nn::Linear layer(8, 8);
  const CastPolicy policy = fp8_policy(*layer);
  const auto run = [&](const at::Tensor& input) {
    const Autocast region(policy);
    return layer->forward(input);
  };
  run(torch::ones({2, 8}));
  policy.fp8_scaling().update();
  const auto before = policy.fp8_scaling().scales();
  {
    const at::NoGradGuard no_grad;
    const at::Tensor result = run(torch::full({2, 8}, 100.0));
    EXPECT_LT(amax_of(result), 10) << "limited to what training has seen";
  }
  {
    const c10::InferenceMode inference;
    EXPECT_EQ(run(torch::full({2, 8}, 100.0)).scalar_type(), torch::kBFloat16);
  }
  policy.fp8_scaling().update();
  EXPECT_EQ(before.at(0).input_scale, policy.fp8_scaling().scales().at(0).input_scale);
}

TEST_F(Fp8, ABatchThatIsLeftOutCanBeForgotten) {
  torch::nn::Linear layer(8, 8);
  const CastPolicy policy = fp8_policy(*layer);
  const auto run = [&](double value) {
    const Autocast region(policy);
    layer->forward(torch::full({2, 8}, value));
  };
  run(1);
  policy.fp8_scaling().update();
  const auto before = policy.fp8_scaling().scales();
  for (const bool discards : {true, false}) {
    run(1e4);
    if (discards) policy.fp8_scaling().discard();
    run(1);
    policy.fp8_scaling().update();
    const float scale = policy.fp8_scaling().scales().at(0).input_scale;
    EXPECT_EQ(scale == before.at(0).input_scale, discards);
  }
}

// A weight in two calls has one scale, of the larger amax, and the sum of both gradients.
TEST_F(Fp8, ASharedWeightHasOneScale) {
  torch::nn::Linear layer(torch::nn::LinearOptions(8, 8).bias(false));
  const CastPolicy policy = fp8_policy(*layer);
  const at::Tensor result = [&] {
    const Autocast region(policy);
    return layer->forward(torch::full({2, 8}, 3.0)) + layer->forward(torch::full({2, 8}, 7.0));
  }();
  result.sum().backward();
  policy.fp8_scaling().update();
  ASSERT_EQ(policy.fp8_scaling().scales().size(), 1U);
  EXPECT_EQ(policy.fp8_scaling().scales()[0].input_scale, scale_of(7, kE4m3));
  EXPECT_TRUE(at::allclose(layer->weight.grad(), torch::full({8, 8}, 20.0), 0.01));
}

TEST_F(Fp8, AHookLeavesWhatItGot) {
  torch::nn::Linear layer(8, 8);
  const CastPolicy policy = fp8_policy(*layer);
  Fp8Scaling scaling = policy.fp8_scaling();
  {
    const Autocast region(policy);
    layer->forward(torch::ones({2, 8}));
  }
  using Hook = Fp8Scaling::AmaxHook;
  for (const Hook& hook : {Hook([](at::Tensor& amax) { amax = amax.max().reshape({1}); }),
                           Hook([](at::Tensor& amax) { amax = amax.to(torch::kDouble); }),
                           Hook([](at::Tensor& amax) { amax.fill_(INFINITY); }),
                           Hook([](at::Tensor& amax) { amax.neg_(); }),
                           Hook([](at::Tensor& amax) { amax = at::Tensor(); })}) {
    scaling.set_amax_hook(hook);
    EXPECT_THAT(error_of([&] { scaling.update(); }), HasSubstr("expected a hook that leaves"));
    EXPECT_EQ(scaling.scales().at(0).input_scale, 0);
  }
  scaling.set_amax_hook([&](at::Tensor& amax) {
    EXPECT_EQ(scaling.scales().size(), 1U);  // it may ask
    amax.mul_(2);
  });
  scaling.update();
  EXPECT_EQ(scaling.scales().at(0).input_scale, 224);
}

TEST_F(Fp8, ScalesHoldForTheirOptions) {
  torch::nn::Linear layer(8, 8);
  std::stringstream saved;
  {
    torch::serialize::OutputArchive out;
    fp8_policy(*layer).fp8_scaling().save(out);
    out.save_to(saved);
  }
  torch::serialize::InputArchive in;
  in.load_from(saved);
  fp8_policy(*layer).fp8_scaling().load(in);
  const std::pair<Fp8Options, const char*> others[] = {
      {Fp8Options().forward(kE5m2), "expected 'forward' of float8_e5m2, got float8_e4m3fn"},
      {Fp8Options().backward(kE4m3), "expected 'backward' of float8_e4m3fn, got float8_e5m2"},
      {Fp8Options().margin(1), "expected 'margin' of 1, got 0"}};
  for (const auto& [options, message] : others) {
    const CastPolicy policy = fp8_policy(*layer, options);
    EXPECT_THAT(error_of([&] { policy.fp8_scaling().load(in); }), HasSubstr(message));
  }
}

TEST_F(Fp8, SavedScalesGoOnBitForBit) {
  const auto train = [](const CastPolicy& policy, Net& net, int from, int to) {
    for (int step = from; step < to; ++step) {
      torch::manual_seed(static_cast<std::uint64_t>(step));
      const at::Tensor input = torch::randn({2, 1, 6, 6}) * std::ldexp(1.0, step % 3);
      at::Tensor loss;
      {
        const Autocast region(policy);
        loss = net.forward(input).square().sum();
      }
      loss.backward();
      const at::NoGradGuard no_grad;
      for (const at::Tensor& parameter : net.parameters()) {
        parameter.sub_(parameter.grad(), 1e-3);
        parameter.mutable_grad().reset();
      }
      policy.fp8_scaling().update();
    }
  };
  torch::manual_seed(1);
  auto whole = std::make_shared<Net>();
  const CastPolicy of_whole = fp8_policy(*whole, Fp8Options().amax_history(4));
  train(of_whole, *whole, 0, 7);
  std::stringstream model;
  std::stringstream scales;
  torch::save(whole, model);
  torch::serialize::OutputArchive out;
  of_whole.fp8_scaling().save(out);
  out.save_to(scales);
  train(of_whole, *whole, 7, 15);

  auto resumed = std::make_shared<Net>();
  torch::load(resumed, model);
  const CastPolicy of_resumed = fp8_policy(*resumed, Fp8Options().amax_history(4));
  torch::serialize::InputArchive in;
  in.load_from(scales);
  of_resumed.fp8_scaling().load(in);
  train(of_resumed, *resumed, 7, 15);
  const auto expected = whole->named_parameters();
  for (const auto& item : resumed->named_parameters())
    expect_bitwise_equal(item.value().detach(), expected[item.key()].detach());

  const CastPolicy longer = fp8_policy(*resumed, Fp8Options().amax_history(5));
  EXPECT_THAT(error_of([&] { longer.fp8_scaling().load(in); }),
              HasSubstr("expected 'amax_history' of 5, got 4"));
  const CastPolicy fewer =
      fp8_policy(*resumed, Fp8Options().amax_history(4).keep_16bit_params({"head.weight"}));
  EXPECT_THAT(error_of([&] { fewer.fp8_scaling().load(in); }),
              HasSubstr("expected 2 weights in fp8"));
}

TEST_F(Fp8, MistakesAreErrors) {
  Net net;
  auto policy = CastPolicy::semitone({torch::kCPU, torch::kBFloat16});
  EXPECT_THAT(error_of([&] { policy.fp8(Fp8Options().forward(torch::kHalf)); }),
              HasSubstr("expected float8_e4m3fn or float8_e5m2, got float16"));
  EXPECT_THAT(error_of([&] { policy.fp8(Fp8Options().amax_history(0)); }), HasSubstr("got 0"));
  EXPECT_THAT(error_of([&] { policy.fp8(Fp8Options().margin(-1)); }), HasSubstr("got -1"));
  EXPECT_THAT(error_of([&] { policy.fp8(Fp8Options().margin(17)); }), HasSubstr("got 17"));
  EXPECT_FALSE(policy.fp8_options().has_value());
  EXPECT_THAT(error_of([&] { policy.fp8_scaling(); }), HasSubstr("without fp8()"));
  policy.fp8();
  EXPECT_THAT(error_of([&] { policy.fp8_scaling(); }), HasSubstr("not bound"));
  EXPECT_THAT(error_of([&] { Autocast region(policy); }), HasSubstr("policy.bind(model)"));
  EXPECT_THAT(error_of([&] { policy.fp8(Fp8Options().keep_16bit_params({"hed.*"})).bind(net); }),
              HasSubstr("'hed.*'"));
  auto bound = CastPolicy::semitone({torch::kCPU, torch::kBFloat16}).bind(net);
  EXPECT_THAT(error_of([&] { bound.fp8(Fp8Options().keep_16bit_params({"hed.*"})); }),
              HasSubstr("'hed.*'"));
  EXPECT_FALSE(bound.fp8_options().has_value());
  const Autocast region(bound);
}

}  // namespace
}  // namespace semitone::amp::fp8_test
