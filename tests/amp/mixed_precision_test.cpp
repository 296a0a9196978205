#include "semitone/amp/initialize.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/core/keep_fp32.h"
#include "tests/support/environment.h"
#include "tests/support/errors.h"
#include "tests/support/recorded_events.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace semitone::amp::mixed_precision_test {
namespace {

using c10::ScalarType;
using test::message_of;
using test::near;
using test::pointwise_tolerance;
using test::RecordedEvents;
using test::reduction_tolerance;
using test::same_bits;
using testing::HasSubstr;

constexpr const char* kLevels[] = {"O0", "O1", "O2", "O3"};
constexpr ScalarType kDtypes[] = {torch::kBFloat16, torch::kHalf};

Options quiet(const Options& options) {
  return Options(options).verbosity(0);
}

// Convolution, batch norm, a frozen layer's place, a linear layer.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("conv", conv);
    register_module("norm", norm);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& x) { return head(torch::relu(norm(conv(x))).mean({2, 3})); }
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(2, 4, 3).padding(1)};
  torch::nn::BatchNorm2d norm{4};
  torch::nn::Linear head{4, 3};
};
TORCH_MODULE(Net);

Net make_net() {
  torch::manual_seed(5);
  Net net;
  const torch::NoGradGuard no_grad;
  net->norm->weight.uniform_(0.5, 1.5);
  net->norm->running_mean.uniform_(-0.1, 0.1);
  return net;
}

at::Tensor images() {
  torch::manual_seed(6);
  return torch::randn({4, 2, 5, 5});
}

// Runs one iteration and returns the result of step().
template <typename Model>
Step train_once(MixedPrecision& mixed, Model& model, torch::optim::Optimizer& optimizer,
                const at::Tensor& x) {
  optimizer.zero_grad();
  mixed.scale_loss(mixed.forward(model, x).pow(2).mean(), optimizer).backward();
  return mixed.step(optimizer);
}

TEST(Initialize, SetsCudnnForItsLifetime) {
  constexpr auto kLimit = "CUDNN_CONV_WSCAP_DBG";
  const test::Environment environment({kLimit});
  at::Context& context = at::globalContext();
  const bool benchmark = context.benchmarkCuDNN();
  const int benchmark_limit = context.benchmarkLimitCuDNN();
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

// ------------------------------------------------------------------ what a model looks like at
// each level

TEST(Initialize, CastsWeightsAsTheLevelSays) {
  for (const auto dtype : kDtypes) {
    for (const std::string level : kLevels) {
      SCOPED_TRACE(level + " " + dtype_name(dtype));
      Net net = make_net();
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
  Net reference = make_net();
  const auto expected = reference->forward(images());
  for (const auto dtype : kDtypes) {
    for (const std::string level : kLevels) {
      SCOPED_TRACE(level + " " + dtype_name(dtype));
      Net net = make_net();
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
  Net net = make_net();
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
    Net net = make_net();
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    auto mixed = initialize(net, optimizer, quiet(Options("O2").keep_batchnorm_fp32(false)));
    EXPECT_EQ(net->norm->weight.scalar_type(), torch::kBFloat16);
    EXPECT_EQ(train_once(mixed, net, optimizer, images()), Step::stepped);
  }
  {
    Net net = make_net();
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
    Net net = make_net();
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    auto mixed = initialize(net, optimizer, quiet(Options("O2").cast_model_type(std::nullopt)));
    EXPECT_EQ(net->conv->weight.scalar_type(), torch::kFloat);
    EXPECT_EQ(train_once(mixed, net, optimizer, images()), Step::stepped);
  }
  {
    Net net = make_net();
    auto mixed = initialize(net, quiet(Options("O3").cast_model_outputs(torch::kHalf)));
    EXPECT_EQ(mixed.forward(net, images()).scalar_type(), torch::kHalf);
  }
  {
    Net net = make_net();
    auto mixed = initialize(net, quiet(Options("O1").patch_torch_functions(false)));
    EXPECT_TRUE(same_bits(mixed.forward(net, images()), make_net()->forward(images())));
  }
}

TEST(Initialize, DisabledChangesNothingAndPassesOn) {
  for (const std::string level : kLevels) {
    Net plain = make_net();
    Net net = make_net();
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
  Net plain = make_net();
  Net net = make_net();
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
    Net net = make_net();
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
  Net low = make_net();
  Net full = make_net();
  torch::optim::SGD low_optimizer(low->parameters(), 0.1);
  torch::optim::SGD full_optimizer(full->parameters(), 0.1);
  auto half = initialize(low, low_optimizer, quiet(Options("O2").dtype(torch::kHalf)));
  auto plain = initialize(full, full_optimizer, quiet("O0"));
  const auto expected = make_net()->forward(images());
  EXPECT_EQ(train_once(half, low, low_optimizer, images()), Step::stepped);
  EXPECT_TRUE(same_bits(plain.forward(full, images()), expected));
  EXPECT_THROW(half.forward(full, images()), Error);
}

// ------------------------------------------------------------------ errors

TEST(Initialize, ModelsThatAreNotFp32AreNamed) {
  for (const std::string level : kLevels) {
    Net net = make_net();
    net->head->to(torch::kHalf);
    EXPECT_EQ(
        message_of<Error>([&] { std::ignore = initialize(net, quiet(level)); }),
        "[amp.initialize] expected a model in float32, got float16 parameter 'head.weight' — "
        "pass the model before casting it: initialize does that. Was it initialized already?");
    EXPECT_EQ(net->conv->weight.scalar_type(), torch::kFloat) << "nothing was changed";
  }
  Net net = make_net();
  net->norm->running_var.set_data(net->norm->running_var.to(torch::kDouble));
  EXPECT_EQ(message_of<Error>([&] { std::ignore = initialize(net, quiet("O2")); }),
            "[amp.initialize] expected a model in float32, got float64 buffer 'norm.running_var' — "
            "cast it with ->to(torch::kFloat)");
}

TEST(Initialize, TwiceIsAnErrorWhereWeightsWereCast) {
  for (const std::string level : {"O2", "O3"}) {
    Net net = make_net();
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    const auto mixed = initialize(net, optimizer, quiet(level));
    EXPECT_THAT(message_of<Error>([&] { std::ignore = initialize(net, optimizer, quiet(level)); }),
                HasSubstr("Was it initialized already?"));
  }
}

TEST(Initialize, NoModelOrAnOptimizerTwiceIsAnError) {
  Net net = make_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  EXPECT_THAT(
      message_of<Error>([&] { std::ignore = initialize(std::vector<Model>{}, {optimizer}); }),
      HasSubstr("expected at least one model, got none"));
  EXPECT_THAT(message_of<Error>([&] { std::ignore = initialize({net}, {optimizer, optimizer}); }),
              HasSubstr("expected each optimizer once"));
  EXPECT_THAT(message_of<Error>([] { std::ignore = initialize(Net(nullptr), quiet("O1")); }),
              HasSubstr("got an empty module holder"));
}

TEST(Initialize, AParameterOfTwoOptimizersCannotHaveMasters) {
  Net net = make_net();
  torch::optim::SGD first(net->parameters(), 0.1);
  torch::optim::SGD second(net->head->parameters(), 0.1);
  EXPECT_THAT(
      message_of<Error>([&] { std::ignore = initialize({net}, {first, second}, quiet("O2")); }),
      HasSubstr("expected each parameter in one optimizer only"));
  EXPECT_EQ(net->conv->weight.scalar_type(), torch::kFloat);
  EXPECT_NO_THROW(initialize({net}, {first, second}, quiet("O1")));
}

TEST(Initialize, LbfgsWorksWhereTrainingIsPlainAndIsRefusedElsewhere) {
  const auto attempt = [](const Options& options) {
    Net net = make_net();
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

TEST(MixedPrecision, UnknownModelsOptimizersAndLossesAreErrors) {
  Net net = make_net();
  Net stranger = make_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  torch::optim::SGD other(stranger->parameters(), 0.1);
  auto mixed = initialize(net, optimizer, quiet(Options("O1").num_losses(2)));
  const auto loss = mixed.forward(net, images()).sum();
  EXPECT_THAT(message_of<Error>([&] { mixed.forward(stranger, images()); }),
              HasSubstr("[amp.mixed_precision.forward] expected a model that was given to "
                        "amp::initialize, got another one"));
  EXPECT_THROW(mixed.forward(stranger->head, torch::ones({1, 4})), Error);
  EXPECT_THROW(mixed.fp32_weights(stranger), Error);
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
    EXPECT_THROW(mixed.scale_loss(loss, optimizer, {.loss_id = bad}).backward(), Error);
  }
}

TEST(MixedPrecision, LossesThatAreNotFloatingAreRefused) {
  Net net = make_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  auto mixed = initialize(net, optimizer, quiet("O2"));
  EXPECT_THROW(mixed.scale_loss(torch::ones({}, torch::kLong), optimizer).backward(), Error);
  EXPECT_THROW(mixed.scale_loss(at::Tensor(), optimizer).backward(), Error);
}

// ------------------------------------------------------------------ parameters kept in fp32

TEST(Initialize, GlobsKeepParametersInFp32) {
  for (const auto dtype : kDtypes) {
    for (const std::string level : {"O1", "O2", "O3"}) {
      SCOPED_TRACE(level + " " + dtype_name(dtype));
      Net net = make_net();
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
    Net net = make_net();
    torch::nn::Linear second(3, 3);
    const auto policy = CastPolicy::semitone().keep_fp32_params("head.*");
    auto mixed = initialize({net, second}, {}, quiet(Options(level).policy(policy)));
    EXPECT_EQ(net->head->weight.scalar_type(), torch::kFloat);
    EXPECT_EQ(mixed.forward(second, mixed.forward(net, images())).scalar_type(), torch::kFloat);
    EXPECT_THROW(
        initialize({make_net(), torch::nn::Linear(3, 3)}, {},
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

// ------------------------------------------------------------------ fine-tuning: frozen layers,
// batch norm in eval

TEST(MixedPrecision, FrozenLayersAndBatchNormInEvalStayAsTheyAre) {
  for (const auto dtype : kDtypes) {
    for (const std::string level : kLevels) {
      SCOPED_TRACE(level + " " + dtype_name(dtype));
      Net net = make_net();
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
    Net net = make_net();
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
    Net net = make_net();
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

// ------------------------------------------------------------------ shared parameters

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

// ------------------------------------------------------------------ what forward takes and gives

struct ContainersImpl : torch::nn::Module {
  ContainersImpl() { register_module("linear", linear); }
  using Result = std::tuple<at::Tensor, std::vector<at::Tensor>, std::optional<at::Tensor>, int>;
  Result forward(const std::tuple<at::Tensor, at::Tensor>& pair,
                 const std::vector<at::Tensor>& list, const std::optional<at::Tensor>& maybe,
                 int factor) {
    seen = {std::get<0>(pair).scalar_type(), std::get<1>(pair).scalar_type(),
            list.at(0).scalar_type(), list.at(1).scalar_type()};
    const auto y = linear(std::get<0>(pair)) * factor;
    return {y,
            {y + 1, list.at(1)},
            maybe.has_value() ? std::optional(linear(*maybe)) : std::nullopt,
            factor};
  }
  torch::nn::Linear linear{3, 3};
  std::vector<ScalarType> seen;
};
TORCH_MODULE(Containers);

TEST(MixedPrecision, ForwardCastsWhateverHoldsTensors) {
  Containers model;
  auto mixed = initialize(model, quiet("O3"));
  const auto x = torch::randn({2, 3});
  const auto ids = torch::ones({2}, torch::kLong);
  const auto wide = torch::ones({2}, torch::kDouble);
  for (const auto& maybe : {std::optional<at::Tensor>(x), std::optional<at::Tensor>()}) {
    const auto [y, list, other, factor] =
        mixed.forward(model, std::tuple(x, ids), std::vector{x, wide}, maybe, 2);
    EXPECT_EQ(model->seen,
              (std::vector{torch::kBFloat16, torch::kLong, torch::kBFloat16, torch::kDouble}));
    EXPECT_EQ(y.scalar_type(), torch::kFloat);
    EXPECT_EQ(list.at(0).scalar_type(), torch::kFloat);
    EXPECT_EQ(list.at(1).scalar_type(), torch::kDouble);
    EXPECT_EQ(other.has_value(), maybe.has_value());
    EXPECT_EQ(other.value_or(x).scalar_type(), torch::kFloat);
    EXPECT_EQ(factor, 2);
  }
}

struct Losses {
  at::Tensor reconstruction;
  at::Tensor divergence;
};
struct Encoded {
  at::Tensor mean;
  Losses losses;
  std::vector<at::Tensor> layers;
  std::int64_t steps = 0;
};
struct Images {
  at::Tensor data;
  std::string name;
};
struct EncoderImpl : torch::nn::Module {
  EncoderImpl() { register_module("linear", linear); }
  Encoded forward(const Images& images) {
    seen = images.data.scalar_type();
    const auto y = linear(images.data);
    return {.mean = y, .losses = {y * 2, y * 3}, .layers = {y, y + 1}, .steps = 7};
  }
  torch::nn::Linear linear{3, 3};
  ScalarType seen = ScalarType::Undefined;
};
TORCH_MODULE(Encoder);

TEST(MixedPrecision, ForwardLooksIntoStructs) {
  const Images input{torch::randn({2, 3}), "digits"};
  for (const auto dtype : kDtypes) {
    for (const std::string level : {"O1", "O2", "O3"}) {
      SCOPED_TRACE(level + " " + dtype_name(dtype));
      Encoder model;
      auto mixed = initialize(model, quiet(Options(level).dtype(dtype)));
      const Encoded result = mixed.forward(model, input);
      EXPECT_EQ(model->seen, level == "O1" ? torch::kFloat : dtype);
      for (const at::Tensor& tensor :
           {result.mean, result.losses.reconstruction, result.losses.divergence,
            result.layers.at(0), result.layers.at(1)})
        EXPECT_EQ(tensor.scalar_type(), torch::kFloat);
      EXPECT_EQ(result.steps, 7);
      EXPECT_TRUE(near(result.losses.reconstruction, result.mean * 2, pointwise_tolerance(dtype)));
      EXPECT_EQ(input.data.scalar_type(), torch::kFloat);
    }
  }
}

TEST(MixedPrecision, ForwardTakesAnyModules) {
  for (const std::string level : kLevels) {
    torch::manual_seed(5);
    torch::nn::AnyModule model(torch::nn::Linear(4, 2));
    torch::optim::SGD optimizer(model.ptr()->parameters(), 0.1);
    auto mixed = initialize(model, optimizer, quiet(level));
    const auto weight = model.ptr()->parameters()[0].detach().to(torch::kFloat).clone();
    EXPECT_EQ(train_once(mixed, model, optimizer, torch::randn({3, 4})), Step::stepped);
    EXPECT_FALSE(near(model.ptr()->parameters()[0].detach(), weight, 1e-4)) << level;
  }
}

// Without the error its operators would run without casts.
TEST(MixedPrecision, AModelOnAnotherDeviceIsAnError) {
  const auto build = [](const Options& options) {
    return [options] { (void)initialize(make_net(), quiet(options)); };
  };
  for (const char* level : {"O1", "O2", "O3"}) {
    test::expect_error(build(Options(level).device(torch::kCUDA).dtype(torch::kHalf)),
                       {"[amp.initialize]", "'conv.weight' on cpu", "Options::device"});
  }
  EXPECT_NO_THROW(build(Options("O0").device(torch::kCUDA))());
  struct Elsewhere : torch::nn::Module {
    Elsewhere() { register_parameter("weight", torch::empty({2, 2}, torch::kMeta)); }
  };
  Net net = make_net();
  const auto elsewhere = std::make_shared<Elsewhere>();
  test::expect_error([&] { (void)initialize({net, elsewhere}, {}, quiet(Options("O1"))); },
                     {"[amp.initialize]", "'weight' on meta"});
}

// An embedding that stays on another device does not decide the device of the model.
TEST(MixedPrecision, TheDeviceIsThatOfMostElements) {
  struct Mixed : torch::nn::Module {
    Mixed() {
      register_parameter("first", torch::empty({2, 2}, torch::kMeta));
      register_module("rest", rest);
    }
    torch::nn::Linear rest{8, 8};
  };
  Mixed model;
  EXPECT_EQ(initialize(model, quiet(Options("O1"))).properties().device, torch::kCPU);
}

// The policy is what its preset and its edits say for the model's device.
TEST(MixedPrecision, APolicyForAnotherDeviceTakesTheRowsOfTheModels) {
  struct Volumes : torch::nn::Module {
    Volumes() { register_module("conv", conv); }
    at::Tensor forward(const at::Tensor& x) { return torch::avg_pool3d(conv(x), 2); }
    torch::nn::Conv3d conv{torch::nn::Conv3dOptions(1, 2, 3)};
  };
  const auto model = std::make_shared<Volumes>();
  const auto policy = CastPolicy::semitone({torch::kCUDA, torch::kHalf}).lower("softmax");
  auto mixed = initialize(model, quiet(Options("O1").policy(policy).dtype(torch::kBFloat16)));
  const auto x = torch::randn({1, 1, 6, 6, 6});
  EXPECT_TRUE(
      near(mixed.forward(model, x), model->forward(x), reduction_tolerance(torch::kBFloat16, 27)));
}

// run(level, dtype) trains a step and returns tensors, which must be those of O0.
template <typename Run>
void expect_results_of_o0(const Run& run, std::initializer_list<const char*> levels) {
  const std::vector<torch::Tensor> want = run("O0", torch::kBFloat16);
  for (const auto dtype : kDtypes) {
    for (const char* level : levels) {
      SCOPED_TRACE(level + (" " + dtype_name(dtype)));
      const std::vector<torch::Tensor> got = run(level, dtype);
      for (std::size_t i = 0; i < want.size(); ++i) {
        const double error = ((got[i] - want[i]).norm() / want[i].norm()).item<double>();
        EXPECT_LT(error, dtype == torch::kHalf ? 5e-3 : 4e-2) << "result " << i;
      }
    }
  }
}

// Tensors that forward itself creates are fp32, while the weights are not.
TEST(MixedPrecision, ForwardMayMakeFp32TensorsOfItsOwnAtO2) {
  struct Maker : torch::nn::Module {
    Maker() {
      register_module("conv", conv);
      register_module("line", line);
      register_module("volume", volume);
      register_module("lstm", lstm);
      register_module("gru", gru);
      register_module("cell", cell);
    }
    std::vector<at::Tensor> forward(const at::Tensor& x) {
      const auto grid =
          torch::nn::functional::affine_grid(torch::eye(2, 3).unsqueeze(0), {1, 2, 6, 6}, false);
      const auto image = torch::grid_sampler(conv(x), grid, 0, 0, false);
      const auto state = torch::zeros({1, 1, 6});
      const auto sequence = image.mean(1).transpose(0, 1);
      const auto [out, hidden] = lstm(sequence, std::tuple(state, state));
      const auto h = std::get<0>(gru(out, state));
      const auto c = std::get<0>(cell(h[0], std::tuple(state[0], state[0])));
      const auto index = torch::zeros({1, 6}, torch::kLong);
      return {image,
              h,
              c,
              line(torch::ones({1, 2, 6})),
              volume(torch::ones({1, 2, 4, 4, 4})),
              torch::dot(c[0], torch::ones({6})),
              torch::scatter_add(torch::zeros({1, 6}), 0, index, c),
              torch::bilinear(c, torch::ones({1, 6}), torch::ones({2, 6, 6}), {})};
    }
    torch::nn::Conv2d conv{torch::nn::Conv2dOptions(2, 2, 3).padding(1)};
    torch::nn::Conv1d line{torch::nn::Conv1dOptions(2, 2, 3)};
    torch::nn::Conv3d volume{torch::nn::Conv3dOptions(2, 2, 3)};
    torch::nn::LSTM lstm{torch::nn::LSTMOptions(6, 6)};
    torch::nn::GRU gru{torch::nn::GRUOptions(6, 6)};
    torch::nn::LSTMCell cell{torch::nn::LSTMCellOptions(6, 6)};
  };
  const auto run = [](const std::string& level, ScalarType dtype) {
    torch::manual_seed(5);
    const auto model = std::make_shared<Maker>();
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    auto mixed = initialize(model, optimizer, quiet(Options(level).dtype(dtype).loss_scale(8)));
    torch::manual_seed(6);
    auto results = mixed.forward(model, torch::randn({1, 2, 6, 6}));
    at::Tensor loss = torch::zeros({});
    for (const at::Tensor& result : results) loss = loss + result.pow(2).sum();
    mixed.scale_loss(loss, optimizer).backward();
    EXPECT_EQ(mixed.step(optimizer), Step::stepped);
    return results;
  };
  expect_results_of_o0(run, {"O1", "O2"});
}

// LibTorch's CPU kernels know fp32 and fp64 only, or are wrong in 16 bits.
TEST(MixedPrecision, OperatorsWithout16BitKernelsComputeInFp32AtO2) {
  struct Maker : torch::nn::Module {
    Maker() { register_module("linear", linear); }
    std::vector<at::Tensor> forward(const at::Tensor& x) {
      const at::Tensor h = linear(x);
      const at::Tensor square = h.t().mm(h) / 8 + torch::eye(6, h.options());
      const at::Tensor pairs = torch::view_as_complex(h.view({8, 3, 2}));
      return {torch::fft_rfft(h).abs(),
              torch::cdist(h, h + 1),
              torch::linalg_solve(square, h.t()),
              torch::linalg_svdvals(square),
              torch::matrix_exp(square * 0.1),
              torch::trace(square),
              torch::quantile(h, 0.25, 0),
              torch::view_as_real(pairs * pairs),
              torch::ctc_loss(h.view({4, 2, 6}).log_softmax(2), torch::ones({2, 2}, torch::kLong),
                              torch::full({2}, 4, torch::kLong), torch::full({2}, 1, torch::kLong)),
              torch::nn::functional::avg_pool3d(h.view({1, 2, 2, 2, 6}),
                                                torch::nn::functional::AvgPool3dFuncOptions(2))};
    }
    torch::nn::Linear linear{6, 6};
  };
  const auto run = [](const std::string& level, ScalarType dtype) {
    torch::manual_seed(5);
    const auto model = std::make_shared<Maker>();
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    auto mixed = initialize(model, optimizer, quiet(Options(level).dtype(dtype).loss_scale(8)));
    torch::manual_seed(6);
    auto results = mixed.forward(model, torch::randn({8, 6}));
    at::Tensor loss = torch::zeros({});
    for (const at::Tensor& result : results) loss = loss + result.pow(2).mean();
    mixed.scale_loss(loss, optimizer).backward();
    results.push_back(mixed.master_params(optimizer)[0].grad().clone());
    EXPECT_EQ(mixed.step(optimizer), Step::stepped);
    return results;
  };
  expect_results_of_o0(run, {"O2", "O3"});
}

// A graph's neighbourhoods, as graph networks multiply by them.
TEST(MixedPrecision, SparseMatricesMayStandInProductsAtEveryLevel) {
  struct Graph : torch::nn::Module {
    Graph() { register_module("linear", linear); }
    at::Tensor forward(const at::Tensor& x, const at::Tensor& neighbours) {
      return torch::mm(neighbours, linear(torch::mm(neighbours, x)));
    }
    torch::nn::Linear linear{6, 4};
  };
  torch::manual_seed(7);
  const at::Tensor x = torch::randn({5, 6});
  const at::Tensor dense = torch::rand({5, 5}).gt(0.5).to(torch::kFloat);
  for (const bool rows : {false, true}) {
    const at::Tensor sparse = rows ? dense.to_sparse_csr() : dense.to_sparse();
    for (const std::string level : kLevels) {
      for (const auto dtype : kDtypes) {
        SCOPED_TRACE(level + " " + dtype_name(dtype) + (rows ? " csr" : " coo"));
        torch::manual_seed(8);
        const auto model = std::make_shared<Graph>();
        const at::Tensor want = model->forward(x, dense).detach();
        const at::Tensor loss = model->forward(x, dense).pow(2).sum();
        loss.backward();
        const at::Tensor gradient = model->linear->weight.grad().clone();
        model->zero_grad();
        torch::optim::SGD optimizer(model->parameters(), 0.1);
        auto mixed =
            initialize(model, optimizer, quiet(Options(level).dtype(dtype).loss_scale(1.0)));
        const at::Tensor got = mixed.forward(model, x, sparse);
        const double tolerance = dtype == torch::kHalf ? 5e-3 : 4e-2;
        EXPECT_LT(((got - want).norm() / want.norm()).item<double>(), tolerance);
        mixed.scale_loss(got.pow(2).sum(), optimizer).backward();
        const at::Tensor seen = mixed.master_params(optimizer)[0].grad().to(torch::kFloat);
        EXPECT_LT(((seen - gradient).norm() / gradient.norm()).item<double>(), tolerance);
        EXPECT_EQ(mixed.step(optimizer), Step::stepped);
      }
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

TEST(MixedPrecision, ForwardTakesModulesHoweverTheyAreHeld) {
  for (const std::string level : kLevels) {
    SCOPED_TRACE(level);
    torch::manual_seed(6);
    auto pointer = std::make_shared<NetImpl>();
    Net holder(pointer);
    torch::manual_seed(6);
    NetImpl reference;
    const at::Tensor expected = reference.forward(images());
    auto mixed = initialize({pointer, reference}, {}, quiet(level));
    // Of the batch, in training: the same each time.
    const at::Tensor output = mixed.forward(pointer, images());
    EXPECT_TRUE(
        near(output, expected, level == "O0" ? 0 : test::rounding_tolerance(torch::kBFloat16, 6)));
    EXPECT_TRUE(same_bits(mixed.forward(*pointer, images()), output));
    EXPECT_TRUE(same_bits(mixed.forward(holder, images()), output));
    EXPECT_TRUE(same_bits(mixed.forward(reference, images()), output));
  }
}

TEST(MixedPrecision, SequentialModels) {
  torch::nn::Sequential model(torch::nn::Linear(4, 8), torch::nn::BatchNorm1d(8),
                              torch::nn::Functional(torch::relu), torch::nn::Linear(8, 2));
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  auto mixed = initialize(model, optimizer, quiet("O2"));
  EXPECT_EQ(train_once(mixed, model, optimizer, torch::randn({6, 4})), Step::stepped);
}

TEST(MixedPrecision, EmbeddingsTakeIntegersAtEveryLevel) {
  for (const auto dtype : kDtypes) {
    for (const std::string level : kLevels) {
      torch::manual_seed(5);
      torch::nn::Sequential model(torch::nn::Embedding(10, 4), torch::nn::Linear(4, 2));
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      auto mixed = initialize(model, optimizer, quiet(Options(level).dtype(dtype).loss_scale(128)));
      EXPECT_EQ(train_once(mixed, model, optimizer, torch::tensor({1, 2, 9})), Step::stepped);
    }
  }
}

TEST(MixedPrecision, SparseEmbeddingsTrainAsInFp32) {
  const auto ids = torch::tensor({1, 4, 1});
  const auto train = [&](const std::string& level, ScalarType dtype) {
    torch::nn::Embedding model(torch::nn::EmbeddingOptions(6, 2).sparse(true));
    {
      const torch::NoGradGuard no_grad;
      model->weight.copy_(torch::arange(12).view({6, 2}) / 4.0);
    }
    torch::optim::SGD optimizer(model->parameters(), 0.125);
    auto mixed = initialize(model, optimizer, quiet(Options(level).dtype(dtype).loss_scale(8)));
    for (int i = 0; i < 2; ++i) {
      optimizer.zero_grad();
      for (int k = 0; k < 2; ++k) {
        mixed.scale_loss(mixed.forward(model, ids).pow(2).sum(), optimizer).backward();
      }
      EXPECT_EQ(mixed.step(optimizer), Step::stepped);
    }
    return model->weight.to(torch::kFloat);
  };
  const auto expected = train("O0", torch::kHalf);
  for (const auto dtype : kDtypes) {
    for (const std::string level : {"O1", "O2", "O3"}) {
      EXPECT_TRUE(near(train(level, dtype), expected, pointwise_tolerance(dtype))) << level;
    }
  }
}

TEST(MixedPrecision, AnExceptionInForwardLeavesNoRegionBehind) {
  for (const std::string level : kLevels) {
    Net net = make_net();
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

// ------------------------------------------------------------------ TorchScript

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

// ------------------------------------------------------------------ verbosity

// Captures the library's log during its lifetime.
class CapturedLog {
 public:
  CapturedLog() : logger_(spdlog::get("semitone")) {
    sink_ = std::make_shared<spdlog::sinks::ostream_sink_mt>(stream_);
    before_ = logger_->sinks();
    logger_->sinks() = {sink_};
  }
  ~CapturedLog() { logger_->sinks() = before_; }
  std::string text() const { return stream_.str(); }

 private:
  std::ostringstream stream_;
  std::shared_ptr<spdlog::logger> logger_;
  spdlog::sink_ptr sink_;
  std::vector<spdlog::sink_ptr> before_;
};

std::string log_of(int verbosity, bool overflow) {
  {
    Net net = make_net();
    std::ignore = initialize(net, "O0");  // the logger is made at its first use
  }
  const CapturedLog log;
  Net net = make_net();
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
      Net net = make_net();
      std::ignore = initialize(net, "O0");  // the logger is made at its first use
    }
    const CapturedLog log;
    Net net = make_net();
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
