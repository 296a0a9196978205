// Running models by other means than the forward of a whole model: other methods, submodules, and
// calls without the MixedPrecision.

#include "semitone/amp/initialize.h"
#include "tests/support/captured_log.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace semitone::amp::other_methods_test {
namespace {

using test::CapturedLog;
using test::expect_bitwise_equal;
using test::message_of;
using testing::HasSubstr;

Options quiet(const char* level, c10::ScalarType dtype = torch::kBFloat16) {
  return Options(level).dtype(dtype).loss_scale(1.0).verbosity(0);
}

// An autoencoder; encode and decode are not forward, and the decoder is a module.
struct AutoencoderImpl : torch::nn::Module {
  AutoencoderImpl() {
    register_module("encoder", encoder);
    register_module("norm", norm);
    register_module("decoder", decoder);
  }
  at::Tensor encode(const at::Tensor& x) { return norm(torch::tanh(encoder(x))); }
  at::Tensor decode(const at::Tensor& z) { return decoder->forward(norm(z)); }
  at::Tensor forward(const at::Tensor& x) { return decode(encode(x)); }

  torch::nn::Linear encoder{12, 6};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({6})};
  torch::nn::Sequential decoder{torch::nn::Linear(6, 8), torch::nn::ReLU(),
                                torch::nn::Linear(8, 12)};
};
TORCH_MODULE(Autoencoder);

Autoencoder autoencoder() {
  torch::manual_seed(2);
  return {};
}

const std::vector<std::pair<const char*, c10::ScalarType>>& levels() {
  static const std::vector<std::pair<const char*, c10::ScalarType>> all{
      {"O0", torch::kBFloat16}, {"O1", torch::kBFloat16}, {"O1", torch::kHalf},
      {"O2", torch::kBFloat16}, {"O2", torch::kHalf},     {"O3", torch::kBFloat16}};
  return all;
}

// decode(encode(x)) equals forward, also in parts: call() casts as forward does.
TEST(Call, RunsOtherMethodsAsForwardRuns) {
  for (const auto& [level, dtype] : levels()) {
    SCOPED_TRACE(level);
    auto model = autoencoder();
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    auto mixed = initialize(model, optimizer, quiet(level, dtype));
    const at::Tensor x = torch::randn({5, 12});
    const auto both = mixed.call(
        [&](const at::Tensor& input) {
          const at::Tensor latent = model->encode(input);
          return std::tuple(latent, model->decode(latent));
        },
        x);
    EXPECT_EQ(std::get<0>(both).scalar_type(), torch::kFloat);
    expect_bitwise_equal(std::get<1>(both), mixed.forward(model, x));

    mixed.scale_loss(std::get<1>(both).square().sum(), optimizer).backward();
    EXPECT_EQ(mixed.step(optimizer), Step::stepped);
    bool called = false;
    mixed.call([&](const at::Tensor&) { called = true; }, x);
    EXPECT_TRUE(called);
  }
}

// fp32 values meet 16-bit weights in the first operator of decode, of any kind.
TEST(AutocastOfAModel, RunsOtherMethodsOnFp32Values) {
  for (const auto& [level, dtype] : levels()) {
    SCOPED_TRACE(level);
    auto model = autoencoder();
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    auto mixed = initialize(model, optimizer, quiet(level, dtype));
    const at::Tensor x = torch::randn({5, 12});
    const at::Tensor z = torch::randn({5, 6});
    at::Tensor latent;
    at::Tensor decoded;
    {
      const auto region = mixed.autocast();
      latent = model->encode(x);
      decoded = model->decode(z);
    }
    const auto want = mixed.call([&](const at::Tensor& input) { return model->decode(input); }, z);
    EXPECT_TRUE(test::near(decoded, want, dtype == torch::kHalf ? 0x1p-9 : 0x1p-6));
    latent.to(torch::kFloat).sum().backward();
    EXPECT_TRUE(model->encoder->weight.grad().defined());
  }
}

// It is forward's region: on a CPU without 16-bit instructions, what it computes is emulated there
// too.
TEST(AutocastOfAModel, EmulatesAsForwardDoes) {
  for (const char* level : {"O2", "O3"}) {
    auto model = autoencoder();
    auto options = quiet(level, torch::kHalf);
    options.policy(CastPolicy::semitone(torch::kHalf).emulation(Emulation::always));
    auto mixed = initialize(model, options);
    const at::Tensor x = torch::randn({5, 12});
    const at::Tensor want = mixed.forward(model, x);
    at::Tensor got;
    {
      const auto region = mixed.autocast();
      got = model->forward(x.to(torch::kHalf)).to(torch::kFloat);
    }
    expect_bitwise_equal(got, want);
  }
}

// As before forward, changed weights update their masters, and changed masters the weights.
TEST(AutocastOfAModel, SeesTheMastersValues) {
  auto model = autoencoder();
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  auto mixed = initialize(model, optimizer, quiet("O2"));
  {
    const torch::NoGradGuard no_grad;
    mixed.master_params(optimizer)[0].fill_(2.0);
  }
  const auto region = mixed.autocast();
  EXPECT_EQ(model->encoder->weight[0][0].item<double>(), 2.0);
}

// What forward returns is in fp32, and losses of it are. In the region it is in 16 bits, and targets are not.
TEST(AutocastOfAModel, ComputesLossesInFp32) {
  namespace F = torch::nn::functional;
  using Loss = at::Tensor (*)(const at::Tensor& scores);
  const std::vector<std::pair<const char*, Loss>> losses{
      {"cross entropy",
       [](const at::Tensor& scores) {
         return torch::cross_entropy_loss(scores, torch::arange(5, torch::kLong));
       }},
      {"negative log-likelihood",
       [](const at::Tensor& scores) {
         return torch::nll_loss(scores, torch::arange(5, torch::kLong));
       }},
      {"mean square",
       [](const at::Tensor& scores) { return torch::mse_loss(scores, torch::ones({5, 12})); }},
      {"smooth L1",
       [](const at::Tensor& scores) {
         return torch::smooth_l1_loss(scores, torch::ones({5, 12}));
       }},
      {"binary cross entropy",
       [](const at::Tensor& scores) {
         return F::binary_cross_entropy(scores.abs().clamp_max(1), torch::full({5, 12}, 0.3F),
                                        F::BinaryCrossEntropyFuncOptions().reduction(torch::kSum));
       }},
      {"with logits",
       [](const at::Tensor& scores) {
         return F::binary_cross_entropy_with_logits(scores, torch::full({5, 12}, 0.3F));
       }},
      {"divergence",
       [](const at::Tensor& scores) { return F::kl_div(scores, torch::full({5, 12}, 0.1F)); }},
  };
  for (const char* level : {"O2", "O3"}) {
    for (const c10::ScalarType dtype : {torch::kBFloat16, torch::kHalf}) {
      auto model = autoencoder();
      auto mixed = initialize(model, quiet(level, dtype));
      for (const auto& [name, loss_of] : losses) {
        SCOPED_TRACE(std::string(level) + ", " + name);
        model->zero_grad();
        at::Tensor scores;
        at::Tensor loss;
        {
          const auto region = mixed.autocast();
          scores = model->forward(torch::randn({5, 12}));
          loss = loss_of(scores);
        }
        EXPECT_EQ(scores.scalar_type(), dtype);
        EXPECT_EQ(loss.scalar_type(), torch::kFloat);
        // Semitone's cross entropy, in the region, sums in another order than LibTorch's.
        const int roundings = name == std::string("cross entropy") ? 3 : 0;
        test::expect_close(loss, loss_of(scores.detach().to(torch::kFloat)),
                           test::rounding_tolerance(torch::kFloat, roundings));
        loss.backward();
        EXPECT_TRUE(model->encoder->weight.grad().abs().sum().to(torch::kFloat).item<float>() > 0);
      }
    }
  }
}

// A program as it was, but for the lines of initialize and the region: functions that train and test get
// the model and the optimizer.
double train(Autoencoder& model, torch::optim::Optimizer& optimizer) {
  model->train();
  torch::manual_seed(5);
  double sum = 0;
  for (int i = 0; i < 6; ++i) {
    const at::Tensor x = torch::randn({8, 12});
    optimizer.zero_grad();
    const at::Tensor loss = torch::mse_loss(model->forward(x), x);
    scale_loss(loss, optimizer).backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 0.5);
    EXPECT_EQ(step(optimizer), Step::stepped);
    sum += loss.item<double>();
  }
  return sum;
}

double evaluate(Autoencoder& model) {
  const c10::InferenceMode inference;
  model->eval();
  torch::manual_seed(6);
  const at::Tensor x = torch::randn({8, 12});
  return torch::mse_loss(model->decode(model->encode(x)), x).item<double>();
}

struct Course {
  std::vector<double> losses;
  std::vector<at::Tensor> weights;
};

Course train_in_region(Options options) {
  auto model = autoencoder();
  torch::optim::Adam optimizer(model->parameters(), 1e-2);
  auto mixed = initialize(model, optimizer, options);
  Course run;
  {
    const auto region = mixed.autocast();
    for (int epoch = 0; epoch < 3; ++epoch) {
      run.losses.push_back(train(model, optimizer));
      run.losses.push_back(evaluate(model));
    }
  }
  run.weights = test::copies(mixed.master_params(optimizer));
  return run;
}

Course train_by_forward(Options options) {
  auto model = autoencoder();
  torch::optim::Adam optimizer(model->parameters(), 1e-2);
  auto mixed = initialize(model, optimizer, options);
  Course run;
  for (int epoch = 0; epoch < 3; ++epoch) {
    torch::manual_seed(5);
    double sum = 0;
    for (int i = 0; i < 6; ++i) {
      const at::Tensor x = torch::randn({8, 12});
      optimizer.zero_grad();
      const at::Tensor loss = torch::mse_loss(mixed.forward(model, x), x);
      mixed.scale_loss(loss, optimizer).backward();
      torch::nn::utils::clip_grad_norm_(model->parameters(), 0.5);
      mixed.step(optimizer);
      sum += loss.item<double>();
    }
    run.losses.push_back(sum);
    torch::manual_seed(6);
    const at::Tensor x = torch::randn({8, 12});
    const c10::InferenceMode inference;
    run.losses.push_back(torch::mse_loss(mixed.forward(model, x), x).item<double>());
  }
  run.weights = test::copies(mixed.master_params(optimizer));
  return run;
}

TEST(AWholeProgramInTheRegion, TrainsAsWithForwardBitForBit) {
  for (const auto& [level, dtype] : levels()) {
    SCOPED_TRACE(std::string(level) + (dtype == torch::kHalf ? " fp16" : " bf16"));
    Options options(level);
    options.dtype(dtype).verbosity(0);
    if (dtype == torch::kHalf)
      options.loss_scale("dynamic").loss_scale_options(LossScaleOptions().init_scale(256));
    const Course got = train_in_region(options);
    const Course want = train_by_forward(options);
    EXPECT_EQ(got.losses, want.losses);
    EXPECT_LT(got.losses.back(), got.losses[1]);
    ASSERT_EQ(got.weights.size(), want.weights.size());
    for (std::size_t i = 0; i < got.weights.size(); ++i)
      expect_bitwise_equal(got.weights[i], want.weights[i]);
  }
}

// A layer in fp32 has its gradients from fp32 products, as outside of a region, where they are from
// matrix products that O1 lowers.
TEST(AWholeProgramInTheRegion, BackPropagatesWithoutCasts) {
  for (const c10::ScalarType dtype : {torch::kBFloat16, torch::kHalf}) {
    const auto grad = [&](bool in_region) {
      auto model = autoencoder();
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      auto options = quiet("O1", dtype);
      options.policy(CastPolicy::semitone(dtype).keep_fp32_params("encoder.*"));
      auto mixed = initialize(model, optimizer, options);
      torch::manual_seed(7);
      const at::Tensor x = torch::randn({8, 12});
      if (in_region) {
        const auto region = mixed.autocast();
        mixed.scale_loss(torch::mse_loss(model->forward(x), x), optimizer).backward();
      } else {
        mixed.scale_loss(torch::mse_loss(mixed.forward(model, x), x), optimizer).backward();
      }
      return model->encoder->weight.grad().clone();
    };
    expect_bitwise_equal(grad(true), grad(false));
  }
}

// Takes its steps along W W^T g, in fp32.
struct MultiplyingOptimizer : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure) override {
    const at::NoGradGuard no_grad;
    for (at::Tensor& weight : param_groups()[0].params())
      weight.sub_(0.1 * weight.mm(weight.t()).mm(weight.grad()));
    return {};
  }
};

TEST(AWholeProgramInTheRegion, StepsWithoutCasts) {
  for (const char* level : {"O1", "O2"}) {
    torch::manual_seed(8);
    torch::nn::Linear model(torch::nn::LinearOptions(12, 12).bias(false));
    MultiplyingOptimizer optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    auto mixed = initialize(model, optimizer, quiet(level));
    const auto region = mixed.autocast();
    mixed.scale_loss(model->forward(torch::randn({8, 12})).square().sum(), optimizer).backward();
    const at::Tensor weight = mixed.master_params(optimizer)[0].detach().clone();
    const at::Tensor grad = mixed.master_params(optimizer)[0].grad().to(torch::kFloat);
    at::Tensor want;
    {
      const DisableCasts no_casts;
      want = weight - 0.1 * weight.mm(weight.t()).mm(grad);
    }
    mixed.step(optimizer);
    expect_bitwise_equal(mixed.master_params(optimizer)[0].detach(), want);
  }
}

TEST(StepOfAnOptimizer, IsOfTheMixedPrecisionThatHasIt) {
  auto model = autoencoder();
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const at::Tensor loss = torch::ones({}, torch::requires_grad());
  EXPECT_THAT(message_of<Error>([&] { step(optimizer); }),
              HasSubstr("one that no MixedPrecision has"));
  EXPECT_THAT(message_of<Error>([&] { scale_loss(loss, optimizer).backward(); }),
              HasSubstr("one that no MixedPrecision has"));
  {
    auto mixed = initialize(model, optimizer, quiet("O1"));
    auto moved = std::move(mixed);
    scale_loss(moved.forward(model, torch::ones({2, 12})).sum(), optimizer).backward();
    EXPECT_EQ(step(optimizer), Step::stepped);
    auto second = initialize(model, optimizer, quiet("O1"));
    EXPECT_THAT(message_of<Error>([&] { step(optimizer); }), HasSubstr("one that 2 have"));
  }
  EXPECT_THAT(message_of<Error>([&] { step(optimizer); }),
              HasSubstr("one that no MixedPrecision has"));
}

using Recurrent = std::tuple<const char*, c10::ScalarType>;

struct RecurrentNetsImpl : torch::nn::Module {
  RecurrentNetsImpl() {
    register_module("lstm", lstm);
    register_module("gru", gru);
    register_module("rnn", rnn);
    register_module("lstm_cell", lstm_cell);
    register_module("gru_cell", gru_cell);
  }
  torch::nn::LSTM lstm{torch::nn::LSTMOptions(4, 6).num_layers(2)};
  torch::nn::GRU gru{torch::nn::GRUOptions(4, 6).bidirectional(true)};
  torch::nn::RNN rnn{torch::nn::RNNOptions(4, 6)};
  torch::nn::LSTMCell lstm_cell{4, 6};
  torch::nn::GRUCell gru_cell{4, 6};
};
TORCH_MODULE(RecurrentNets);

class RecurrentNetworks : public testing::TestWithParam<Recurrent> {};

// Packed sequences too, which go through a method of their own.
TEST_P(RecurrentNetworks, TakeFp32BesideSixteenBitWeights) {
  const auto& [level, dtype] = GetParam();
  torch::manual_seed(2);
  RecurrentNets nets;
  torch::optim::SGD optimizer(nets->parameters(), 0.1);
  auto mixed = initialize(nets, optimizer, quiet(level, dtype));
  const at::Tensor x = torch::randn({5, 3, 4});
  const auto packed =
      torch::nn::utils::rnn::pack_padded_sequence(x, torch::tensor({5, 4, 2}, torch::kLong));
  const at::Tensor h = torch::randn({3, 6});
  const auto run = [&] {
    return std::vector<at::Tensor>{
        std::get<0>(nets->lstm(x)),
        std::get<0>(nets->gru(x)),
        std::get<0>(nets->rnn(x)),
        std::get<0>(nets->lstm->forward_with_packed_input(packed)).data(),
        std::get<0>(nets->gru->forward_with_packed_input(packed)).data(),
        std::get<0>(nets->lstm_cell(x[0], std::tuple(h, h))),
        nets->gru_cell(x[0], h)};
  };
  std::vector<at::Tensor> want;
  {
    const auto fp32 = mixed.fp32_weights(nets);
    const torch::NoGradGuard no_grad;
    want = run();
  }
  std::vector<at::Tensor> results;
  {
    const auto region = mixed.autocast();
    results = run();
  }
  // Values of about 1 through some ten roundings.
  const double unit = dtype == torch::kHalf ? 0x1p-11 : 0x1p-8;
  at::Tensor loss = torch::zeros({});
  for (std::size_t i = 0; i < results.size(); ++i) {
    EXPECT_EQ(results[i].scalar_type(), dtype) << i;
    EXPECT_LE((results[i].to(torch::kFloat) - want[i]).abs().max().item<double>(), 4 * unit) << i;
    loss = loss + results[i].to(torch::kFloat).square().sum();
  }
  mixed.scale_loss(loss, optimizer).backward();
  for (const at::Tensor& parameter : mixed.master_params(optimizer)) {
    ASSERT_TRUE(parameter.grad().defined());
    EXPECT_GT(parameter.grad().abs().sum().item<double>(), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(AtEveryLevel, RecurrentNetworks,
                         testing::Combine(testing::Values("O2", "O3"),
                                          testing::Values(torch::kBFloat16, torch::kHalf)),
                         [](const auto& tested) {
                           return std::string(std::get<0>(tested.param)) +
                                  (std::get<1>(tested.param) == torch::kHalf ? "_fp16" : "_bf16");
                         });

TEST(ModulesInsideAModel, AreRunByForward) {
  for (const auto& [level, dtype] : levels()) {
    SCOPED_TRACE(level);
    auto model = autoencoder();
    auto other = autoencoder();
    auto mixed = initialize(model, quiet(level, dtype));
    const at::Tensor z = torch::randn({5, 6});
    for (int i = 0; i < 2; ++i) {  // first searched, then remembered
      const at::Tensor decoded = mixed.forward(model->decoder, z);
      EXPECT_EQ(decoded.scalar_type(), torch::kFloat);
      const at::Tensor want =
          mixed.call([&](const at::Tensor& x) { return model->decoder->forward(x); }, z);
      expect_bitwise_equal(decoded, want);
    }
    auto inner = model->decoder->ptr<torch::nn::LinearImpl>(0);
    EXPECT_EQ(mixed.forward(inner, z).sizes(), (std::vector<std::int64_t>{5, 8}));
    EXPECT_THAT(message_of<Error>([&] { mixed.forward(other->decoder, z); }),
                HasSubstr("expected a model that was given to amp::initialize"));
  }
}

// Held by no shared pointer, as the examples' models are.
TEST(ModulesInsideAModel, MayBelongToAModelHeldByValue) {
  AutoencoderImpl model;
  auto mixed = initialize(model, quiet("O2"));
  EXPECT_EQ(mixed.forward(model.decoder, torch::randn({5, 6})).scalar_type(), torch::kFloat);
}

TEST(ModulesInsideAModel, MayBeTorchScript) {
  torch::jit::Module inner("Inner");
  inner.register_parameter("weight", torch::ones({3, 4}), false);
  inner.define("def forward(self, x: Tensor):\n    return torch.linear(x, self.weight)\n");
  torch::jit::Module outer("Outer");
  outer.register_module("inner", inner);
  outer.define("def forward(self, x: Tensor):\n    return self.inner.forward(x) * 2\n");
  auto mixed = initialize(outer, quiet("O2"));
  auto part = outer.attr("inner").toModule();
  const auto result = mixed.forward(part, torch::ones({2, 4}));
  EXPECT_EQ(result.toTensor().scalar_type(), torch::kFloat);
  EXPECT_EQ(result.toTensor()[0][0].item<double>(), 4.0);
}

// The log of three steps of training with the test's own forward.
template <typename Forward>
std::string log_of(const char* level, Forward&& forward) {
  auto model = autoencoder();
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  {
    // Makes the logger.
    const auto other = initialize(autoencoder(), Options(level).verbosity(1));
  }
  auto mixed = initialize(model, optimizer, quiet(level).verbosity(1));
  const CapturedLog log;
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    const at::Tensor loss = forward(mixed, model, torch::ones({2, 12}));
    mixed.scale_loss(loss, optimizer).backward();
    EXPECT_EQ(mixed.step(optimizer), Step::stepped);
  }
  return log.text();
}

TEST(AModelThatNeverRanInMixedPrecision, IsWarnedOfOnce) {
  for (const char* level : {"O1", "O2"}) {
    const std::string text =
        log_of(level, [](MixedPrecision&, Autoencoder& model, const at::Tensor& x) {
          return model->forward(x.to(model->encoder->weight.scalar_type()))
              .to(torch::kFloat)
              .square()
              .sum();
        });
    const auto first = text.find("mixed.forward(model, …)");
    EXPECT_NE(first, std::string::npos) << level << text;
    EXPECT_EQ(text.find("mixed.forward(model, …)", first + 1), std::string::npos) << text;
  }
}

TEST(AModelThatNeverRanInMixedPrecision, IsNotWarnedOfWhereItRan) {
  using Model = Autoencoder;
  for (const char* level : {"O0", "O1", "O2"}) {
    EXPECT_EQ(
        log_of(level, [](MixedPrecision& mixed, Model& model,
                         const at::Tensor& x) { return mixed.forward(model, x).square().sum(); }),
        "");
    EXPECT_EQ(log_of(level,
                     [](MixedPrecision& mixed, Model& model, const at::Tensor& x) {
                       const auto region = mixed.autocast();
                       return model->forward(x).to(torch::kFloat).square().sum();
                     }),
              "");
    EXPECT_EQ(log_of(level,
                     [](MixedPrecision& mixed, Model& model, const at::Tensor& x) {
                       return mixed
                           .call([&](const at::Tensor& input) { return model->encode(input); }, x)
                           .square()
                           .sum();
                     }),
              "");
    EXPECT_EQ(log_of(level,
                     [](MixedPrecision& mixed, Model& model, const at::Tensor& x) {
                       return mixed.forward(model->encoder, x).square().sum();
                     }),
              "");
  }
  // O0 has nothing to warn about.
  EXPECT_EQ(log_of("O0", [](MixedPrecision&, Model& model,
                            const at::Tensor& x) { return model->forward(x).square().sum(); }),
            "");
}

// With two models, the message names the right one.
TEST(AModelThatNeverRanInMixedPrecision, IsNamedByItsPlace) {
  auto generator = autoencoder();
  auto discriminator = autoencoder();
  torch::optim::SGD one(generator->parameters(), 0.1);
  torch::optim::SGD two(discriminator->parameters(), 0.1);
  auto mixed = initialize({generator, discriminator}, {one, two}, quiet("O1").verbosity(1));
  const CapturedLog log;
  const at::Tensor made = mixed.forward(generator, torch::ones({2, 12}));
  mixed.scale_loss(discriminator->forward(made).square().sum(), OptimizerRefs{one, two}).backward();
  mixed.step(one);
  EXPECT_EQ(log.text(), "");
  mixed.step(two);
  EXPECT_THAT(log.text(), HasSubstr("model 1 is trained"));
}

// A loss that reaches two models leaves gradients in both. At O2 those of loss.backward() are in the
// 16-bit models, and zero_grad() of the optimizer, which has the masters, leaves them there.
TEST(BackwardWithoutScaleLoss, IsWarnedOfWhereZeroGradDoesNotReach) {
  const auto log_of = [](const char* level, bool by_scale_loss) {
    auto one = autoencoder();
    auto two = autoencoder();
    torch::optim::SGD first(one->parameters(), 0.1);
    torch::optim::SGD second(two->parameters(), 0.1);
    auto mixed = initialize({one, two}, {first, second}, quiet(level).verbosity(1));
    const CapturedLog log;
    for (int i = 0; i < 3; ++i) {
      const at::Tensor loss = mixed.forward(two, mixed.forward(one, torch::ones({2, 12}))).sum();
      first.zero_grad();
      by_scale_loss ? mixed.scale_loss(loss, first).backward() : loss.backward();
      mixed.step(first);
    }
    return log.text();
  };
  const std::string text = log_of("O2", false);
  const auto said = text.find("does not clear such gradients in the model");
  EXPECT_NE(said, std::string::npos) << text;
  EXPECT_EQ(text.find("does not clear", said + 20), std::string::npos) << text;
  EXPECT_EQ(log_of("O2", true), "");
  EXPECT_EQ(log_of("O1", false), "");
}

TEST(Call, MayReturnAReferenceToAnArgument) {
  Autoencoder model = autoencoder();
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  auto mixed = initialize(model, optimizer, quiet("O2"));
  const at::Tensor input = torch::arange(12.0);
  expect_bitwise_equal(mixed.call(std::identity(), input), input);
}

// Its results are members.
struct KeepsItsLossImpl : torch::nn::Module {
  KeepsItsLossImpl() { register_module("linear", linear); }
  void forward(const at::Tensor& x) { loss = linear(x).pow(2).mean(); }
  torch::nn::Linear linear{12, 6};
  at::Tensor loss;
};
TORCH_MODULE(KeepsItsLoss);

TEST(Forward, MayReturnNothing) {
  KeepsItsLoss model;
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  auto mixed = initialize(model, optimizer, quiet("O1"));
  mixed.forward(model, torch::ones({2, 12}));
  KeepsItsLossImpl& module = *model;
  mixed.forward(module, torch::ones({2, 12}));
  mixed.scale_loss(model->loss, optimizer).backward();
  EXPECT_TRUE(model->linear->weight.grad().defined());
}

}  // namespace
}  // namespace semitone::amp::other_methods_test
