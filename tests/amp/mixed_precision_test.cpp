// MixedPrecision: errors, frozen and shared parameters, TorchScript, and what it logs.

#include "semitone/amp/mixed_precision.h"

#include "semitone/amp/initialize.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/optim/fused_sgd.h"
#include "tests/amp/mixed_precision_fixture.h"
#include "tests/support/captured_log.h"
#include "tests/support/errors.h"
#include "tests/support/levels.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"
#include "tests/support/toy_nets.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace semitone::amp::mixed_precision_test {
namespace {

using c10::ScalarType;
using test::CapturedLog;
using test::kDtypes;
using test::kLevels;
using test::message_of;
using test::near;
using test::pointwise_tolerance;
using test::reduction_tolerance;
using test::same_bits;
using testing::HasSubstr;

TEST(MixedPrecision, UnknownModelsOptimizersAndLossesAreErrors) {
  ToyConvNet net = make_net();
  ToyConvNet stranger = make_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  torch::optim::SGD other(stranger->parameters(), 0.1);
  auto mixed = initialize(net, optimizer, quiet(Options("O1").num_losses(2)));
  const auto loss = mixed.forward(net, images()).sum();
  EXPECT_THAT(message_of<Error>([&] { mixed.forward(stranger, images()); }),
              HasSubstr("[amp.mixed_precision.forward] expected a model that was given to "
                        "amp::initialize, got another one"));
  EXPECT_THROW(mixed.forward(stranger->head, torch::ones({1, 4})), Error);
  EXPECT_THROW(std::ignore = mixed.fp32_weights(stranger), Error);
  EXPECT_THAT(message_of<Error>([&] { mixed.scale_loss(loss, other).backward(); }),
              HasSubstr("[amp.mixed_precision.scale_loss] expected an optimizer that was given"));
  EXPECT_THROW(mixed.step(other), Error);
  EXPECT_THROW(mixed.zero_grad(other), Error);
  EXPECT_THROW(mixed.master_params(other), Error);
  EXPECT_THAT(message_of<Error>([&] { mixed.scale_loss(loss, OptimizerRefs{}).backward(); }),
              HasSubstr("expected at least one optimizer"));
  EXPECT_NO_THROW(mixed.loss_scaler(1));
  for (const std::int64_t bad : {-1, 2}) {
    EXPECT_THAT(message_of<Error>([&] { mixed.loss_scaler(bad); }),
                HasSubstr("expected a loss_id below 2, got " + std::to_string(bad)));
    EXPECT_THROW(mixed.scale_loss(loss, optimizer, ScaleLossOptions().loss_id(bad)).backward(),
                 Error);
  }
}

TEST(MixedPrecision, LossesThatAreNotFloatingAreRefused) {
  ToyConvNet net = make_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  auto mixed = initialize(net, optimizer, quiet("O2"));
  EXPECT_THROW(mixed.scale_loss(torch::ones({}, torch::kLong), optimizer).backward(), Error);
  EXPECT_THROW(mixed.scale_loss(at::Tensor(), optimizer).backward(), Error);
}

TEST(MixedPrecision, FrozenLayersAndBatchNormInEvalStayAsTheyAre) {
  for (const auto dtype : kDtypes) {
    for (const std::string level : kLevels) {
      SCOPED_TRACE(level + " " + dtype_name(dtype));
      ToyConvNet net = make_net();
      for (at::Tensor& p : net->conv->parameters()) p.requires_grad_(false);
      for (at::Tensor& p : net->norm->parameters()) p.requires_grad_(false);
      net->norm->eval();
      torch::optim::SGD optimizer(net->parameters(),
                                  torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1));
      auto mixed = initialize(net, optimizer, quiet(Options(level).dtype(dtype)));
      const auto conv = net->conv->weight.clone();
      const auto scale = net->norm->weight.clone();
      const auto mean = net->norm->running_mean.clone();
      const auto head = net->head->weight.clone();
      EXPECT_EQ(net->norm->running_mean.scalar_type(), level == "O3" ? dtype : torch::kFloat);
      for (int i = 0; i < 3; ++i) {
        EXPECT_EQ(train_once(mixed, net, optimizer, images()), Step::stepped);
      }
      EXPECT_TRUE(same_bits(net->conv->weight, conv));
      EXPECT_TRUE(same_bits(net->norm->weight, scale));
      EXPECT_TRUE(same_bits(net->norm->running_mean, mean));
      EXPECT_EQ(net->norm->num_batches_tracked.item<std::int64_t>(), 0);
      EXPECT_FALSE(same_bits(net->head->weight, head));
      EXPECT_FALSE(net->conv->weight.grad().defined());
    }
  }
}

TEST(MixedPrecision, BatchNormStatisticsAreTakenInFp32AtO2) {
  for (const auto dtype : kDtypes) {
    ToyConvNet net = make_net();
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    auto mixed = initialize(net, optimizer, quiet(Options("O2").dtype(dtype)));
    net->train();
    const auto before = net->norm->running_mean.clone();
    mixed.forward(net, images());
    EXPECT_EQ(net->norm->running_mean.scalar_type(), torch::kFloat);
    EXPECT_FALSE(same_bits(net->norm->running_mean, before));
    // Not on the 16-bit grid.
    EXPECT_FALSE(
        same_bits(net->norm->running_mean.to(dtype).to(torch::kFloat), net->norm->running_mean));
  }
}

TEST(MixedPrecision, LayersThatAreFrozenNoMoreAreTrained) {
  for (const std::string level : kLevels) {
    ToyConvNet net = make_net();
    for (at::Tensor& p : net->conv->parameters()) p.requires_grad_(false);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    auto mixed = initialize(net, optimizer, quiet(level));
    train_once(mixed, net, optimizer, images());
    for (at::Tensor& p : net->conv->parameters()) p.requires_grad_(true);
    const auto before = net->conv->weight.clone();
    train_once(mixed, net, optimizer, images());
    EXPECT_FALSE(same_bits(net->conv->weight, before)) << level;
  }
}

// One weight for input and output: the same tensor under two names, or two tensors of one memory.
struct Tied : torch::nn::Module {
  explicit Tied(bool same_tensor) {
    const auto weight = (torch::arange(24).view({6, 4}) % 5 - 2) / 4.0;
    in = register_parameter("in", weight);
    out = register_parameter("out", same_tensor ? in : in.variable_data());
  }
  at::Tensor forward(const at::Tensor& ids) {
    return torch::linear(torch::embedding(in, ids), out);
  }
  at::Tensor in;
  at::Tensor out;
};

TEST(MixedPrecision, TiedWeightsStayTied) {
  const auto ids = torch::tensor({1, 3, 5, 1});
  const auto train = [&](const std::string& level, ScalarType dtype, bool same_tensor) {
    auto model = std::make_shared<Tied>(same_tensor);
    torch::optim::SGD optimizer(model->parameters(), 0.125);
    auto mixed = initialize(model, optimizer, quiet(Options(level).dtype(dtype).loss_scale(4)));
    for (int i = 0; i < 2; ++i) {
      mixed.zero_grad(optimizer);
      mixed.scale_loss(mixed.forward(model, ids).sum(), optimizer).backward();
      EXPECT_EQ(mixed.step(optimizer), Step::stepped);
    }
    EXPECT_EQ(model->in.const_data_ptr(), model->out.const_data_ptr());
    EXPECT_EQ(model->in.is_same(model->out), same_tensor);
    return model->in.to(torch::kFloat);
  };
  for (const bool same_tensor : {true, false}) {
    const auto expected = train("O0", torch::kHalf, same_tensor);
    for (const auto dtype : kDtypes) {
      for (const std::string level : {"O1", "O2", "O3"}) {
        SCOPED_TRACE(level + " " + dtype_name(dtype) + (same_tensor ? " one tensor" : " two"));
        EXPECT_TRUE(near(train(level, dtype, same_tensor), expected, pointwise_tolerance(dtype)));
      }
    }
  }
}

TEST(MixedPrecision, WeightsTiedAcrossModelsStayTied) {
  const auto train = [&](const std::string& level, bool fused) {
    torch::manual_seed(2);
    torch::nn::Linear encoder(4, 4);
    torch::nn::Linear decoder(4, 4);
    decoder->weight.set_data(encoder->weight.variable_data());
    auto parameters = encoder->parameters();
    for (const at::Tensor& parameter : decoder->parameters()) parameters.push_back(parameter);
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (fused) {
      optimizer = std::make_unique<optim::FusedSGD>(parameters, optim::FusedSGDOptions(0.125));
    } else {
      optimizer = std::make_unique<torch::optim::SGD>(parameters, 0.125);
    }
    auto mixed =
        initialize({encoder, decoder}, {*optimizer}, quiet(Options(level).dtype(torch::kBFloat16)));
    for (int i = 0; i < 3; ++i) {
      mixed.zero_grad(*optimizer);
      const auto hidden = mixed.forward(encoder, torch::ones({2, 4}));
      mixed.scale_loss(mixed.forward(decoder, hidden).to(torch::kFloat).sum(), *optimizer)
          .backward();
      mixed.step(*optimizer);
    }
    EXPECT_EQ(encoder->weight.const_data_ptr(), decoder->weight.const_data_ptr());
    EXPECT_FALSE(encoder->weight.is_same(decoder->weight));
    return encoder->weight.detach().to(torch::kFloat);
  };
  for (const bool fused : {false, true}) {
    const auto expected = train("O0", fused);
    for (const std::string level : {"O1", "O2", "O3"}) {
      SCOPED_TRACE(level + (fused ? " fused" : ""));
      EXPECT_TRUE(near(train(level, fused), expected, 0.02));
    }
  }
}

TEST(MixedPrecision, ThatWasMovedFromIsAnError) {
  auto net = make_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  auto mixed = initialize(net, optimizer, quiet("O2"));
  auto moved = std::move(mixed);
  moved.forward(net, images());
  // NOLINTBEGIN(bugprone-use-after-move)
  EXPECT_THAT(message_of<Error>([&] { mixed.forward(net, images()); }), HasSubstr("moved from"));
  EXPECT_THAT(message_of<Error>([&] { mixed.step(optimizer); }), HasSubstr("moved from"));
  EXPECT_THAT(message_of<Error>([&] { mixed.skipped_steps(); }), HasSubstr("moved from"));
  // NOLINTEND(bugprone-use-after-move)
}

TEST(MixedPrecision, AnExceptionInForwardLeavesNoRegionBehind) {
  for (const std::string level : kLevels) {
    ToyConvNet net = make_net();
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    auto mixed = initialize(net, optimizer, quiet(level));
    EXPECT_ANY_THROW(mixed.forward(net, torch::ones({1, 7, 5, 5})));  // 7 channels for 2
    EXPECT_FALSE(autocast_enabled(torch::kCPU));
    EXPECT_EQ(train_once(mixed, net, optimizer, images()), Step::stepped);
  }
}

TEST(MixedPrecision, AutocastIsTheRegionOfForwardWhichCastsAtO1Only) {
  struct Probe : torch::nn::Module {
    Probe() { register_parameter("weight", torch::ones({2})); }
    bool forward(const at::Tensor&) { return autocast_enabled(torch::kCPU); }
  };
  for (const std::string level : kLevels) {
    auto probe = std::make_shared<Probe>();
    auto mixed = initialize(probe, quiet(level));
    const bool in_forward = mixed.forward(probe, torch::ones({2}));
    EXPECT_EQ(in_forward, level != "O0");
    const auto region = mixed.autocast();
    EXPECT_EQ(autocast_enabled(torch::kCPU), in_forward);
    EXPECT_EQ(torch::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type(),
              level == "O1" ? torch::kBFloat16 : torch::kFloat);
  }
}

torch::jit::Module script() {
  torch::jit::Module module("Net");
  torch::manual_seed(5);
  module.register_parameter("weight", torch::randn({3, 4}).requires_grad_(), false);
  module.register_parameter("bias", torch::randn({3}).requires_grad_(), false);
  module.register_buffer("offset", torch::ones({3}));
  module.define(R"(
    def forward(self, x: Tensor, ids: Tensor):
        y = torch.linear(x, self.weight, self.bias) + self.offset
        return y, {"ids": [ids], "y": [y]}
  )");
  return module;
}

TEST(MixedPrecision, TorchScriptModelsTrainAtEveryLevel) {
  const auto x = torch::randn({2, 4});
  const auto ids = torch::ones({2}, torch::kLong);
  const auto expected = script().forward({x, ids}).toTupleRef().elements()[0].toTensor();
  for (const auto dtype : kDtypes) {
    for (const std::string level : kLevels) {
      SCOPED_TRACE(level + " " + dtype_name(dtype));
      auto model = script();
      std::vector<at::Tensor> parameters;
      for (const auto& p : model.parameters()) parameters.push_back(p);
      torch::optim::SGD optimizer(parameters, 0.1);
      auto mixed = initialize(model, optimizer, quiet(Options(level).dtype(dtype).loss_scale(128)));
      const bool casts = level == "O2" || level == "O3";
      EXPECT_EQ(model.attr("weight").toTensor().scalar_type(), casts ? dtype : torch::kFloat);
      EXPECT_EQ(model.attr("offset").toTensor().scalar_type(), casts ? dtype : torch::kFloat);
      const c10::IValue result = mixed.forward(model, x, ids);
      const auto& elements = result.toTupleRef().elements();
      EXPECT_EQ(elements[0].toTensor().scalar_type(), torch::kFloat);
      EXPECT_TRUE(near(
          elements[0].toTensor(), expected,
          level == "O0" ? reduction_tolerance(torch::kFloat, 4) : reduction_tolerance(dtype, 4)));
      const auto dict = elements[1].toGenericDict();
      EXPECT_EQ(dict.at("ids").toList().get(0).toTensor().scalar_type(), torch::kLong);
      EXPECT_EQ(dict.at("y").toList().get(0).toTensor().scalar_type(), torch::kFloat);

      const auto before = model.attr("weight").toTensor().clone();
      optimizer.zero_grad();
      const auto output = mixed.forward(model, x, ids).toTupleRef().elements()[0].toTensor();
      mixed.scale_loss(output.pow(2).mean(), optimizer).backward();
      EXPECT_EQ(mixed.step(optimizer), Step::stepped);
      EXPECT_FALSE(same_bits(model.attr("weight").toTensor(), before));
    }
  }
}

std::string log_of(int verbosity, bool overflow) {
  {
    ToyConvNet net = make_net();
    std::ignore = initialize(net, "O0");  // the logger is made at its first use
  }
  const CapturedLog log;
  ToyConvNet net = make_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  auto mixed = initialize(net, optimizer,
                          Options("O1").dtype(torch::kHalf).verbosity(verbosity).loss_scale(128));
  auto scaled = mixed.scale_loss(mixed.forward(net, images()).sum(), optimizer);
  scaled.value().backward();
  if (overflow) net->norm->weight.mutable_grad()[0] = std::numeric_limits<float>::infinity();
  scaled.finish();
  mixed.step(optimizer);
  return log.text();
}

TEST(MixedPrecision, AnEpsThatFloat16RoundsToZeroIsWarnedAboutOnce) {
  const auto log_with = [](const std::function<std::unique_ptr<torch::optim::Optimizer>(
                               const std::vector<at::Tensor>&)>& make,
                           const char* level, int verbosity) {
    {
      ToyConvNet net = make_net();
      std::ignore = initialize(net, "O0");  // the logger is made at its first use
    }
    const CapturedLog log;
    ToyConvNet net = make_net();
    const auto optimizer = make(net->parameters());
    auto mixed =
        initialize(net, *optimizer, Options(level).dtype(torch::kHalf).verbosity(verbosity));
    const std::string text = log.text();
    const auto at = text.find("is 0 in float16");
    EXPECT_EQ(text.find("is 0 in float16", at == text.npos ? at : at + 1), text.npos) << text;
    return at == text.npos ? std::string() : text;
  };
  const auto adam = [](double eps) {
    return
        [eps](
            const std::vector<at::Tensor>& parameters) -> std::unique_ptr<torch::optim::Optimizer> {
          return std::make_unique<torch::optim::Adam>(parameters,
                                                      torch::optim::AdamOptions(0.1).eps(eps));
        };
  };
  EXPECT_THAT(
      log_with(adam(1e-8), "O3", 1),
      testing::AllOf(HasSubstr("Adam's eps 1e-08 is 0 in float16"), HasSubstr("or use O2")));
  EXPECT_EQ(log_with(adam(1e-8), "O3", 0), "");
  EXPECT_EQ(log_with(adam(6e-5), "O3", 1), "");
  EXPECT_THAT(log_with(adam(0x1p-25), "O3", 1), HasSubstr("is 0 in float16"));
  EXPECT_EQ(log_with(adam(0x1.1p-25), "O3", 1), "");
  EXPECT_EQ(log_with(adam(1e-8), "O2", 1), "");
  EXPECT_EQ(log_with(adam(1e-8), "O1", 1), "");
  const auto rmsprop =
      [](const std::vector<at::Tensor>& parameters) -> std::unique_ptr<torch::optim::Optimizer> {
    return std::make_unique<torch::optim::RMSprop>(parameters);
  };
  EXPECT_THAT(log_with(rmsprop, "O3", 1), HasSubstr("RMSprop's eps 1e-08"));
  const auto sgd =
      [](const std::vector<at::Tensor>& parameters) -> std::unique_ptr<torch::optim::Optimizer> {
    return std::make_unique<torch::optim::SGD>(parameters, 0.1);
  };
  EXPECT_EQ(log_with(sgd, "O3", 1), "");
}

TEST(MixedPrecision, VerbosityIsSilentByZeroTellsByOneAndShowsCastsByTwo) {
  EXPECT_EQ(log_of(0, true), "");
  const auto normal = log_of(1, false);
  EXPECT_THAT(normal, HasSubstr("opt level O1 with float16 on cpu"));
  EXPECT_THAT(normal, testing::Not(HasSubstr("conv2d")));
  EXPECT_THAT(normal, testing::Not(HasSubstr("skipped")));
  EXPECT_THAT(log_of(1, true),
              HasSubstr("skipped a step: loss 0 overflowed at scale 128, inf or NaN in 1 "
                        "gradients, nearest the loss that of 'norm.weight'"));
  const auto casts = log_of(2, false);
  EXPECT_THAT(casts, HasSubstr("conv2d: float32 -> float16, 200 elements"));
}

}  // namespace
}  // namespace semitone::amp::mixed_precision_test
