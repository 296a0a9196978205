// initialize: weights and properties at each level, parameters kept in fp32, and its errors.

#include "semitone/amp/initialize.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/core/keep_fp32.h"
#include "tests/amp/mixed_precision_fixture.h"
#include "tests/support/environment.h"
#include "tests/support/errors.h"
#include "tests/support/levels.h"
#include "tests/support/recorded_events.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace semitone::amp::mixed_precision_test {
namespace {

using test::kDtypes;
using test::kLevels;
using test::message_of;
using test::near;
using test::RecordedEvents;
using test::reduction_tolerance;
using test::same_bits;
using testing::HasSubstr;

TEST(Initialize, SetsCudnnForItsLifetime) {
  constexpr auto kLimit = "CUDNN_CONV_WSCAP_DBG";
  const test::Environment environment({kLimit});
  at::Context& context = at::globalContext();
  const bool benchmark = context.benchmarkCuDNN();
  const int benchmark_limit = context.benchmarkLimitCuDNN();
  {
    const auto disabled =
        initialize(make_net(), quiet(Options("O1").enabled(false).cudnn_benchmark(!benchmark)));
    EXPECT_EQ(context.benchmarkCuDNN(), benchmark);
  }
  {
    const auto mixed = initialize(make_net(), quiet(Options("O1")
                                                        .cudnn_benchmark(!benchmark)
                                                        .cudnn_benchmark_limit(benchmark_limit + 1)
                                                        .cudnn_workspace_limit(256)));
    EXPECT_EQ(context.benchmarkCuDNN(), !benchmark);
    EXPECT_EQ(context.benchmarkLimitCuDNN(), benchmark_limit + 1);
    EXPECT_STREQ(std::getenv(kLimit), "256");
    const auto other = initialize(make_net(), quiet("O1"));
    EXPECT_EQ(context.benchmarkCuDNN(), !benchmark);
  }
  // In any order of destruction.
  auto first = initialize(make_net(), quiet(Options("O1").cudnn_benchmark(!benchmark)));
  first = initialize(make_net(), quiet(Options("O1").cudnn_benchmark(!benchmark)));
  EXPECT_EQ(context.benchmarkCuDNN(), !benchmark);
  {
    auto second =
        std::make_optional(initialize(make_net(), quiet(Options("O1").cudnn_benchmark_limit(3))));
    first = initialize(make_net(), quiet("O1"));
    EXPECT_EQ(context.benchmarkLimitCuDNN(), 3);
    context.setBenchmarkCuDNN(!benchmark);  // set directly, and kept by initialize
  }
  EXPECT_EQ(context.benchmarkCuDNN(), !benchmark);
  context.setBenchmarkCuDNN(benchmark);
  EXPECT_EQ(context.benchmarkCuDNN(), benchmark);
  EXPECT_EQ(context.benchmarkLimitCuDNN(), benchmark_limit);
  // cuDNN reads it once, and other threads may read the environment now: it stays.
  EXPECT_STREQ(std::getenv(kLimit), "256");
  const char* const before = std::getenv(kLimit);
  const auto again = initialize(make_net(), quiet(Options("O1").cudnn_workspace_limit(256)));
  EXPECT_EQ(std::getenv(kLimit), before);  // not written once more
}

TEST(Initialize, CastsWeightsAsTheLevelSays) {
  for (const auto dtype : kDtypes) {
    for (const std::string level : kLevels) {
      SCOPED_TRACE(level + " " + dtype_name(dtype));
      ToyConvNet net = make_net();
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      const auto mixed = initialize(net, optimizer, quiet(Options(level).dtype(dtype)));
      const bool casts = level == "O2" || level == "O3";
      const auto weights = casts ? dtype : torch::kFloat;
      const auto norm = level == "O3" ? dtype : torch::kFloat;
      EXPECT_EQ(net->conv->weight.scalar_type(), weights);
      EXPECT_EQ(net->head->bias.scalar_type(), weights);
      EXPECT_EQ(net->norm->weight.scalar_type(), norm);
      EXPECT_EQ(net->norm->bias.scalar_type(), norm);
      EXPECT_EQ(net->norm->running_mean.scalar_type(), norm);
      EXPECT_EQ(net->norm->running_var.scalar_type(), norm);
      EXPECT_EQ(net->norm->num_batches_tracked.scalar_type(), torch::kLong);
      // The optimizer of O2 works on fp32 masters, that of O3 on the weights themselves.
      const auto& first = optimizer.param_groups()[0].params()[0];
      EXPECT_EQ(first.scalar_type(), level == "O3" ? dtype : torch::kFloat);
      EXPECT_EQ(first.is_same(net->conv->weight), level != "O2");
      EXPECT_EQ(mixed.properties().opt_level, parse_opt_level(level));
    }
  }
}

TEST(Initialize, ForwardTakesAndGivesFp32AndTrainsAtEveryLevel) {
  ToyConvNet reference = make_net();
  const auto expected = reference->forward(images());
  for (const auto dtype : kDtypes) {
    for (const std::string level : kLevels) {
      SCOPED_TRACE(level + " " + dtype_name(dtype));
      ToyConvNet net = make_net();
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      auto mixed = initialize(net, optimizer, quiet(Options(level).dtype(dtype)));
      const auto output = mixed.forward(net, images());
      EXPECT_EQ(output.scalar_type(), torch::kFloat);
      EXPECT_TRUE(near(
          output, expected,
          level == "O0" ? reduction_tolerance(torch::kFloat, 18) : reduction_tolerance(dtype, 4)));
      double first = 0;
      double last = 0;
      for (int i = 0; i < 20; ++i) {
        const auto loss = mixed.forward(net, images()).pow(2).mean();
        optimizer.zero_grad();
        mixed.scale_loss(loss, optimizer).backward();
        mixed.step(optimizer);
        (i == 0 ? first : last) = loss.item<double>();
      }
      EXPECT_LT(last, 0.7 * first);
    }
  }
}

TEST(Initialize, MastersAreTheWeightsFromBeforeTheCast) {
  ToyConvNet net = make_net();
  const auto exact = net->conv->weight.detach().clone();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const auto mixed = initialize(net, optimizer, quiet("O2"));
  EXPECT_TRUE(same_bits(mixed.master_params(optimizer)[0], exact));
  EXPECT_FALSE(same_bits(net->conv->weight.to(torch::kFloat), exact));
  // Batch norm is its own master.
  EXPECT_TRUE(mixed.master_params(optimizer)[2].is_same(net->norm->weight));
}

TEST(Initialize, PropertiesOverrideTheLevel) {
  {
    ToyConvNet net = make_net();
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    auto mixed = initialize(net, optimizer, quiet(Options("O2").keep_batchnorm_fp32(false)));
    EXPECT_EQ(net->norm->weight.scalar_type(), torch::kBFloat16);
    EXPECT_EQ(train_once(mixed, net, optimizer, images()), Step::stepped);
  }
  {
    ToyConvNet net = make_net();
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    auto mixed = initialize(
        net, optimizer,
        quiet(Options("O3").keep_batchnorm_fp32("True").master_weights(true).loss_scale(4)));
    EXPECT_EQ(net->norm->running_var.scalar_type(), torch::kFloat);
    EXPECT_FALSE(optimizer.param_groups()[0].params()[0].is_same(net->conv->weight));
    EXPECT_EQ(train_once(mixed, net, optimizer, images()), Step::stepped);
  }
  {
    // Casting off, everything else as O2: Apex's own tests isolate its masters like this.
    ToyConvNet net = make_net();
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    auto mixed = initialize(net, optimizer, quiet(Options("O2").cast_model_type(std::nullopt)));
    EXPECT_EQ(net->conv->weight.scalar_type(), torch::kFloat);
    EXPECT_EQ(train_once(mixed, net, optimizer, images()), Step::stepped);
  }
  {
    ToyConvNet net = make_net();
    auto mixed = initialize(net, quiet(Options("O3").cast_model_outputs(torch::kHalf)));
    EXPECT_EQ(mixed.forward(net, images()).scalar_type(), torch::kHalf);
  }
  {
    ToyConvNet net = make_net();
    auto mixed = initialize(net, quiet(Options("O1").patch_torch_functions(false)));
    EXPECT_TRUE(same_bits(mixed.forward(net, images()), make_net()->forward(images())));
  }
}

TEST(Initialize, DisabledChangesNothingAndPassesOn) {
  for (const std::string level : kLevels) {
    ToyConvNet plain = make_net();
    ToyConvNet net = make_net();
    torch::optim::SGD plain_optimizer(plain->parameters(),
                                      torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    auto mixed = initialize(net, optimizer, Options(level).dtype(torch::kHalf).enabled(false));
    EXPECT_EQ(net->conv->weight.scalar_type(), torch::kFloat);
    EXPECT_TRUE(optimizer.param_groups()[0].params()[0].is_same(net->conv->weight));
    for (int i = 0; i < 3; ++i) {
      plain_optimizer.zero_grad();
      plain->forward(images()).pow(2).mean().backward();
      plain_optimizer.step();
      optimizer.zero_grad();
      const auto loss = mixed.forward(net, images()).pow(2).mean();
      auto scaled = mixed.scale_loss(loss, optimizer);
      EXPECT_TRUE(scaled.value().is_same(loss));
      scaled.backward();
      EXPECT_EQ(mixed.step(optimizer), Step::stepped);
    }
    EXPECT_TRUE(same_bits(net->conv->weight, plain->conv->weight));
    EXPECT_TRUE(same_bits(mixed.forward(net, images()), plain->forward(images())));
  }
}

TEST(Initialize, O0IsPlainFp32TrainingBitForBit) {
  ToyConvNet plain = make_net();
  ToyConvNet net = make_net();
  torch::optim::Adam plain_optimizer(plain->parameters(), 0.01);
  torch::optim::Adam optimizer(net->parameters(), 0.01);
  auto mixed = initialize(net, optimizer, quiet("O0"));
  for (int i = 0; i < 3; ++i) {
    plain_optimizer.zero_grad();
    plain->forward(images()).pow(2).mean().backward();
    plain_optimizer.step();
    train_once(mixed, net, optimizer, images());
  }
  for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
    EXPECT_TRUE(same_bits(net->parameters()[i], plain->parameters()[i]));
  }
}

TEST(Initialize, ForInferenceWithoutOptimizers) {
  for (const std::string level : kLevels) {
    SCOPED_TRACE(level);
    ToyConvNet net = make_net();
    net->eval();
    const torch::NoGradGuard no_grad;
    const at::Tensor expected = net->forward(images());
    auto mixed = initialize(net, quiet(level));
    const at::Tensor output = mixed.forward(net, images());
    EXPECT_EQ(output.scalar_type(), torch::kFloat);
    EXPECT_TRUE(
        near(output, expected, level == "O0" ? 0 : test::rounding_tolerance(torch::kBFloat16, 6)));
  }
}

TEST(Initialize, SeveralSideBySideDoNotMeet) {
  ToyConvNet low = make_net();
  ToyConvNet full = make_net();
  torch::optim::SGD low_optimizer(low->parameters(), 0.1);
  torch::optim::SGD full_optimizer(full->parameters(), 0.1);
  auto half = initialize(low, low_optimizer, quiet(Options("O2").dtype(torch::kHalf)));
  auto plain = initialize(full, full_optimizer, quiet("O0"));
  const auto expected = make_net()->forward(images());
  EXPECT_EQ(train_once(half, low, low_optimizer, images()), Step::stepped);
  EXPECT_TRUE(same_bits(plain.forward(full, images()), expected));
  EXPECT_THROW(half.forward(full, images()), Error);
}

TEST(Initialize, ModelsThatAreNotFp32AreNamed) {
  for (const std::string level : kLevels) {
    ToyConvNet net = make_net();
    net->head->to(torch::kHalf);
    EXPECT_EQ(
        message_of<Error>([&] { std::ignore = initialize(net, quiet(level)); }),
        "[amp.initialize] expected a model in float32, got float16 parameter 'head.weight' — "
        "pass the model before casting it: initialize does that. Was it initialized already?");
    EXPECT_EQ(net->conv->weight.scalar_type(), torch::kFloat) << "nothing was changed";
  }
  ToyConvNet net = make_net();
  net->norm->running_var.set_data(net->norm->running_var.to(torch::kDouble));
  EXPECT_EQ(message_of<Error>([&] { std::ignore = initialize(net, quiet("O2")); }),
            "[amp.initialize] expected a model in float32, got float64 buffer 'norm.running_var' — "
            "cast it with ->to(torch::kFloat); or, to keep its precision, name only its fp32 "
            "submodules in initialize, and run the model inside mixed.autocast()");
}

TEST(Initialize, TwiceIsAnErrorWhereWeightsWereCast) {
  for (const std::string level : {"O2", "O3"}) {
    ToyConvNet net = make_net();
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    const auto mixed = initialize(net, optimizer, quiet(level));
    EXPECT_THAT(message_of<Error>([&] { std::ignore = initialize(net, optimizer, quiet(level)); }),
                HasSubstr("Was it initialized already?"));
  }
}

TEST(Initialize, NoModelOrAnOptimizerTwiceIsAnError) {
  ToyConvNet net = make_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  EXPECT_THAT(
      message_of<Error>([&] { std::ignore = initialize(std::vector<Model>{}, {optimizer}); }),
      HasSubstr("expected at least one model, got none"));
  EXPECT_THAT(message_of<Error>([&] { std::ignore = initialize({net}, {optimizer, optimizer}); }),
              HasSubstr("expected each optimizer once"));
  EXPECT_THAT(message_of<Error>([] { std::ignore = initialize(ToyConvNet(nullptr), quiet("O1")); }),
              HasSubstr("got an empty module holder"));
}

TEST(Initialize, AParameterOfTwoOptimizersCannotHaveMasters) {
  ToyConvNet net = make_net();
  torch::optim::SGD first(net->parameters(), 0.1);
  torch::optim::SGD second(net->head->parameters(), 0.1);
  EXPECT_THAT(
      message_of<Error>([&] { std::ignore = initialize({net}, {first, second}, quiet("O2")); }),
      HasSubstr("expected each parameter in one optimizer only"));
  EXPECT_EQ(net->conv->weight.scalar_type(), torch::kFloat);
  EXPECT_NO_THROW(std::ignore = initialize({net}, {first, second}, quiet("O1")));
}

TEST(Initialize, LbfgsWorksWhereTrainingIsPlainAndIsRefusedElsewhere) {
  const auto attempt = [](const Options& options) {
    ToyConvNet net = make_net();
    torch::optim::LBFGS optimizer(net->parameters(), torch::optim::LBFGSOptions(0.1).max_iter(5));
    auto mixed = initialize(net, optimizer, quiet(options));
    const auto x = images();
    const auto closure = [&] {
      optimizer.zero_grad();
      auto loss = mixed.forward(net, x).pow(2).mean();
      loss.backward();
      return loss;
    };
    const double before = closure().item<double>();
    optimizer.step(closure);
    EXPECT_LT(closure().item<double>(), before);
  };
  attempt("O0");
  attempt(Options("O1").dtype(torch::kBFloat16));
  for (const Options& options :
       {Options("O0").loss_scale("dynamic"), Options("O0").loss_scale(2), Options("O2"),
        Options("O1").dtype(torch::kHalf), Options("O3").master_weights(true)}) {
    EXPECT_THAT(message_of<Error>([&] { attempt(options); }), HasSubstr("got LBFGS at O"));
  }
}

TEST(Initialize, GlobsKeepParametersInFp32) {
  for (const auto dtype : kDtypes) {
    for (const std::string level : {"O1", "O2", "O3"}) {
      SCOPED_TRACE(level + " " + dtype_name(dtype));
      ToyConvNet net = make_net();
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      auto mixed = initialize(net, optimizer,
                              quiet(Options(level).dtype(dtype).policy(
                                  CastPolicy::semitone().keep_fp32_params("head.*"))));
      EXPECT_EQ(net->head->weight.scalar_type(), torch::kFloat);
      EXPECT_EQ(net->conv->weight.scalar_type(), level == "O1" ? torch::kFloat : dtype);
      const RecordedEvents events;
      EXPECT_EQ(mixed.forward(net, images()).scalar_type(), torch::kFloat);
      EXPECT_EQ(train_once(mixed, net, optimizer, images()), Step::stepped);
      EXPECT_EQ(net->head->weight.grad().scalar_type(), torch::kFloat);
    }
  }
}

TEST(Initialize, GlobsMayMatchInOneOfSeveralModels) {
  for (const std::string level : {"O1", "O2"}) {
    ToyConvNet net = make_net();
    torch::nn::Linear second(3, 3);
    const auto policy = CastPolicy::semitone().keep_fp32_params("head.*");
    auto mixed = initialize({net, second}, {}, quiet(Options(level).policy(policy)));
    EXPECT_EQ(net->head->weight.scalar_type(), torch::kFloat);
    EXPECT_EQ(mixed.forward(second, mixed.forward(net, images())).scalar_type(), torch::kFloat);
    EXPECT_THROW(std::ignore = initialize(
                     {make_net(), torch::nn::Linear(3, 3)}, {},
                     quiet(Options(level).policy(CastPolicy(policy).keep_fp32_params("x*")))),
                 Error);
  }
}

struct OwnNormImpl : torch::nn::Module, KeepFp32 {
  OwnNormImpl() {
    scale = register_parameter("scale", torch::ones({4}));
    mean = register_buffer("mean", torch::zeros({4}));
    register_module("inner", inner);
  }
  at::Tensor forward(const at::Tensor& x) {
    return inner(((x.to(torch::kFloat) - mean) * scale).to(x.scalar_type()));
  }
  at::Tensor scale;
  at::Tensor mean;
  torch::nn::Linear inner{4, 4};
};
TORCH_MODULE(OwnNorm);

TEST(Initialize, ModulesMarkedKeepFp32KeepTheirOwnTensorsOnly) {
  OwnNorm model;
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  auto mixed = initialize(model, optimizer, quiet("O2"));
  EXPECT_EQ(model->scale.scalar_type(), torch::kFloat);
  EXPECT_EQ(model->mean.scalar_type(), torch::kFloat);
  EXPECT_EQ(model->inner->weight.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(train_once(mixed, model, optimizer, torch::randn({2, 4})), Step::stepped);
}

// Its fp32 result is passed to 16-bit weights.
struct ScaleImpl : torch::nn::Module, KeepFp32 {
  ScaleImpl() : scale(register_parameter("scale", torch::full({4}, 2.F))) {}
  at::Tensor forward(const at::Tensor& x) { return x * scale; }
  at::Tensor scale;
};
TORCH_MODULE(Scale);

TEST(Initialize, KeptLayersMayStandAnywhere) {
  const auto models = [] {
    torch::manual_seed(3);
    return std::vector<std::pair<torch::nn::Sequential, at::Tensor>>{
        {torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::ReLU(), torch::nn::Linear(4, 3)),
         torch::randn({2, 4})},
        {torch::nn::Sequential(torch::nn::Embedding(5, 4), torch::nn::Linear(4, 3)),
         torch::tensor({0, 4, 2})},
        {torch::nn::Sequential(torch::nn::Conv2d(1, 4, 3), torch::nn::Conv2d(4, 3, 3)),
         torch::randn({2, 1, 6, 6})},
        {torch::nn::Sequential(torch::nn::Linear(4, 4), Scale(), torch::nn::Linear(4, 3)),
         torch::randn({2, 4})}};
  };
  for (const auto dtype : kDtypes) {
    for (const std::string level : {"O1", "O2", "O3"}) {
      for (std::size_t which = 0; which < 4; ++which) {
        SCOPED_TRACE(level + " " + dtype_name(dtype) + " " + std::to_string(which));
        const auto expected = [&] {
          auto [model, input] = models()[which];
          return model->forward(input).detach();
        }();
        auto [model, input] = models()[which];
        torch::optim::SGD optimizer(model->parameters(), 0.1);
        Options options = quiet(Options(level).dtype(dtype).loss_scale(8));
        if (which < 3) options.policy(CastPolicy::semitone().keep_fp32_params("0.*"));
        auto mixed = initialize(model, optimizer, options);
        if (which < 3) {
          EXPECT_EQ(model->parameters()[0].scalar_type(), torch::kFloat);
        }
        const auto output = mixed.forward(model, input);
        // Inputs, weights and results of two layers are rounded.
        test::expect_close(output.detach().to(torch::kFloat), expected,
                           test::rounding_tolerance(dtype, 8));
        mixed.scale_loss(output.square().sum(), optimizer).backward();
        EXPECT_EQ(mixed.step(optimizer), Step::stepped);
      }
    }
  }
}

TEST(Initialize, BatchNormWithoutWeightsFollowsTheModel) {
  torch::nn::BatchNorm1d plain(torch::nn::BatchNorm1dOptions(4).affine(false));
  auto mixed = initialize(plain, quiet("O2"));
  EXPECT_EQ(plain->running_mean.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(mixed.forward(plain, torch::randn({8, 4})).scalar_type(), torch::kFloat);
}

}  // namespace
}  // namespace semitone::amp::mixed_precision_test
