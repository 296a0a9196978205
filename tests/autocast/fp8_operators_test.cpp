// Which products of a network are in fp8, and which are not.

#include "semitone/autocast/autocast.h"
#include "semitone/core/events.h"
#include "tests/autocast/fp8_fixture.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace semitone::amp::fp8_test {
namespace {

using test::expect_bitwise_equal;

std::multiset<std::string> casts_to_fp8_in(const std::function<void()>& run) {
  struct Log : events::Listener {
    using Listener::on;
    void on(const events::Cast& cast) override {
      const std::lock_guard lock(mutex);
      if (cast.to == kE4m3 || cast.to == kE5m2)
        casts.insert(std::string(cast.op) + (cast.to == kE4m3 ? " e4m3" : " e5m2"));
    }
    std::mutex mutex;
    std::multiset<std::string> casts;
  };
  const auto log = std::make_shared<Log>();
  {
    const events::Listen listen(log);
    run();
  }
  return log->casts;
}

// In one forward and backward.
std::multiset<std::string> casts_to_fp8(const CastPolicy& policy, Net& net) {
  return casts_to_fp8_in([&] {
    const at::Tensor result = [&] {
      const Autocast region(policy);
      return net.forward(torch::randn({2, 1, 6, 6}));
    }();
    result.sum().backward();
  });
}

TEST_F(Fp8, LayersThatAPolicyKeepsAreNotRounded) {
  Net net;
  const std::multiset<std::string> all{"conv2d e4m3", "conv2d e4m3", "conv2d e5m2",
                                       "addmm e4m3",  "addmm e4m3",  "addmm e5m2",
                                       "addmm e4m3",  "addmm e4m3",  "addmm e5m2"};
  EXPECT_EQ(casts_to_fp8(fp8_policy(net), net), all);
  const std::multiset<std::string> without_conv{"addmm e4m3", "addmm e4m3", "addmm e5m2",
                                                "addmm e4m3", "addmm e4m3", "addmm e5m2"};
  const auto semitone = CastPolicy::semitone({torch::kCPU, torch::kBFloat16}).fp8();
  EXPECT_EQ(casts_to_fp8(CastPolicy(semitone).keep_fp32("conv2d").bind(net), net), without_conv);
  EXPECT_EQ(casts_to_fp8(CastPolicy(semitone).keep_fp32_params("conv.*").bind(net), net),
            without_conv);
  EXPECT_EQ(casts_to_fp8(semitone.bind(net).keep_fp32_params("conv.*"), net), without_conv);
  const auto chosen = Fp8Options().keep_16bit_params({"conv.*"});
  EXPECT_EQ(casts_to_fp8(fp8_policy(net, chosen), net), without_conv);
  EXPECT_EQ(casts_to_fp8(
                CastPolicy::semitone({torch::kCPU, torch::kBFloat16}).bind(net).fp8(chosen), net),
            without_conv);
}

TEST_F(Fp8, WeightsOf16BitsAreRoundedUnderPresetNone) {
  Net net;
  for (at::Tensor& parameter : net.parameters()) parameter.set_data(parameter.to(torch::kBFloat16));
  const CastPolicy policy = CastPolicy::none({torch::kCPU, torch::kBFloat16}).fp8().bind(net);
  const Autocast region(policy);
  at::Tensor result;
  EXPECT_EQ(casts_to_fp8_in([&] {
              result = net.forward(torch::randn({2, 1, 6, 6}).to(torch::kBFloat16));
            }).size(),
            6U);
  EXPECT_EQ(result.scalar_type(), torch::kBFloat16);
  result.sum().backward();
  EXPECT_EQ(net.head->weight.grad().scalar_type(), torch::kBFloat16);
}

// The gradient of a gradient: roundings count as exact.
TEST_F(Fp8, GradientsCanBeDifferentiated) {
  torch::nn::Linear layer(torch::nn::LinearOptions(4, 4).bias(false));
  const CastPolicy policy = fp8_policy(*layer);
  const at::Tensor input = torch::randn({3, 4}).requires_grad_();
  const auto penalty_grad = [&](bool in_fp8) {
    at::Tensor result;
    if (in_fp8) {
      const Autocast region(policy);
      result = layer->forward(input).to(torch::kFloat).tanh();
    } else {
      result = layer->forward(input).tanh();
    }
    const at::Tensor grad =
        torch::autograd::grad({result.sum()}, {input}, {}, true, /*create_graph=*/true)[0];
    return torch::autograd::grad({grad.square().sum()}, {layer->weight})[0];
  };
  const at::Tensor exact = penalty_grad(false);
  const at::Tensor in_fp8 = penalty_grad(true);
  EXPECT_LT(((in_fp8 - exact).norm() / exact.norm()).item<float>(), 0.2F);
  EXPECT_GT(((in_fp8 - exact).norm() / exact.norm()).item<float>(), 1e-4F);
}

// A function of the user multiplies gradients in its backward: not with the scales of inputs.
struct OwnLinear : torch::autograd::Function<OwnLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& weight, const CastPolicy* policy) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["policy"] = reinterpret_cast<std::intptr_t>(policy);
    return at::mm(x, weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Autocast region(*reinterpret_cast<const CastPolicy*>(ctx->saved_data["policy"].toInt()));
    return {at::mm(grads[0], saved[1].t()), at::mm(saved[0].t(), grads[0]), {}};
  }
};

TEST_F(Fp8, ProductsWithinABackwardPassStayIn16Bits) {
  torch::nn::Linear layer(torch::nn::LinearOptions(8, 8).bias(false));
  const CastPolicy policy = fp8_policy(*layer);
  const at::Tensor input = torch::randn({3, 8}).requires_grad_();
  {
    const Autocast region(policy);
    layer->forward(torch::full({1, 8}, 1e-3));  // a scale that gradients would not fit
  }
  policy.fp8_scaling().update();
  const at::Tensor result = [&] {
    const Autocast region(policy);
    return OwnLinear::apply(input, layer->weight, &policy);
  }();
  result.sum().backward();
  const at::Tensor want = torch::ones({3, 8}).mm(layer->weight.detach().t());
  EXPECT_TRUE(at::allclose(input.grad(), want, 0.02, 0.02)) << input.grad() - want;
}

// Products of a gradient and a weight are up to 57344 x 448, which fp16 does not hold.
TEST_F(Fp8, ABackwardPassWithinARegionIsTheSame) {
  for (const std::vector<std::int64_t>& sizes :
       {std::vector<std::int64_t>{64, 64}, std::vector<std::int64_t>{4, 16, 64}}) {
    SCOPED_TRACE(sizes.size());
    torch::nn::Linear layer(64, 64);
    const at::Tensor input = torch::randn(sizes).requires_grad_();
    std::vector<at::Tensor> gradients;
    for (const bool is_within : {false, true}) {
      const CastPolicy policy = fp8_policy(*layer, {}, torch::kHalf);
      auto region = std::make_unique<Autocast>(policy);
      const at::Tensor loss = layer->forward(input).to(torch::kFloat).mean();
      if (!is_within) region.reset();
      loss.backward();
      region.reset();
      for (at::Tensor tensor : {at::Tensor(input), layer->weight, layer->bias}) {
        EXPECT_TRUE(tensor.grad().isfinite().all().item<bool>());
        gradients.push_back(tensor.grad());
        tensor.mutable_grad() = at::Tensor();
      }
    }
    for (std::size_t i = 0; i < 3; ++i) expect_bitwise_equal(gradients[i], gradients[i + 3]);
  }
}

// On every processor: on some, a layer is one operator of oneDNN, on others a chain of products.
TEST_F(Fp8, RecurrentLayersAreNotRounded) {
  const auto expect_none = [](auto layer, const at::Tensor& input) {
    for (const char* const preset : {"semitone", "torch", "apex", "paddle", "paddle-o2"}) {
      for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
        for (at::Tensor& parameter : layer->parameters()) parameter.set_data(parameter.to(dtype));
        const CastPolicy policy =
            CastPolicy::by_name(preset, {torch::kCPU, torch::kBFloat16}).fp8().bind(*layer);
        const auto casts = casts_to_fp8_in([&] {
          const Autocast region(policy);
          layer->forward(input.to(dtype));
        });
        EXPECT_TRUE(casts.empty()) << preset << ' ' << layer->name() << ' ' << casts.size();
      }
    }
  };
  const at::Tensor sequence = torch::randn({3, 2, 8});
  expect_none(torch::nn::LSTM(8, 8), sequence);
  expect_none(torch::nn::GRU(8, 8), sequence);
  expect_none(torch::nn::RNN(8, 8), sequence);
  expect_none(torch::nn::LSTMCell(8, 8), sequence[0]);
  expect_none(torch::nn::GRUCell(8, 8), sequence[0]);
  expect_none(torch::nn::RNNCell(8, 8), sequence[0]);
}

// A product of two parameters, as of learned queries.
TEST_F(Fp8, AProductWithALayerIn16BitsIsNotRounded) {
  struct Queries : torch::nn::Module {
    Queries()
        : queries(register_parameter("queries", torch::randn({4, 8}))),
          head(register_module("head", torch::nn::Linear(8, 8))) {}
    at::Tensor queries;
    torch::nn::Linear head;
  };
  const auto model = std::make_shared<Queries>();
  const auto casts = [&](const Fp8Options& options) {
    const CastPolicy policy = fp8_policy(*model, options);
    return casts_to_fp8_in([&] {
             const Autocast region(policy);
             model->head(model->queries);
             at::mm(model->queries, model->head->weight.t());
           })
        .size();
  };
  EXPECT_EQ(casts(Fp8Options().keep_16bit_params({"head.*"})), 0U);
  EXPECT_EQ(casts({}), 4U);
}

struct Recomputed : torch::autograd::Function<Recomputed> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            torch::nn::Linear* layer, const CastPolicy* policy) {
    ctx->save_for_backward({x});
    ctx->saved_data["layer"] = reinterpret_cast<std::intptr_t>(layer);
    ctx->saved_data["policy"] = reinterpret_cast<std::intptr_t>(policy);
    return (*layer)->forward(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const at::AutoGradMode grad_mode(true);
    const at::Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_();
    auto& layer = *reinterpret_cast<torch::nn::Linear*>(ctx->saved_data["layer"].toInt());
    const at::Tensor result = [&] {
      const Autocast region(
          *reinterpret_cast<const CastPolicy*>(ctx->saved_data["policy"].toInt()));
      return layer->forward(x);
    }();
    result.backward(grads[0]);
    return {x.grad(), {}, {}};
  }
};

TEST_F(Fp8, ARecomputedForwardPassIsTheSame) {
  torch::nn::Linear layer(8, 8);
  const at::Tensor input = torch::randn({3, 8}).requires_grad_();
  std::vector<at::Tensor> gradients;
  for (const bool recomputes : {false, true}) {
    const CastPolicy policy = fp8_policy(*layer);
    for (int step = 0; step < 2; ++step) {
      layer->zero_grad();
      const at::Tensor result = [&] {
        const Autocast region(policy);
        return recomputes ? Recomputed::apply(input, &layer, &policy) : layer->forward(input);
      }();
      result.sum().backward();
      policy.fp8_scaling().update();
    }
    EXPECT_GT(policy.fp8_scaling().scales().at(0).grad_output_scale, 0);
    gradients.push_back(layer->weight.grad().clone());
  }
  expect_bitwise_equal(gradients[0], gradients[1]);
}

}  // namespace
}  // namespace semitone::amp::fp8_test
