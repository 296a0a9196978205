// Gradients that a program reads, clips, changes and drops in the model, and complex ones.

#include "semitone/amp/initialize.h"
#include "semitone/core/dtype.h"
#include "semitone/optim/clip_grad.h"
#include "semitone/scaling/grad_scaler.h"
#include "src/core/dtype_limits.h"
#include "tests/amp/training_idioms_fixture.h"
#include "tests/support/captured_log.h"
#include "tests/support/levels.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

namespace semitone::amp::training_idioms_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_close;
using test::kDtypes;
using test::kLevels;

struct Case {
  std::string name;
  Options options;
  MakeOptimizer optimizer;
};
void PrintTo(const Case& one, std::ostream* stream) {
  *stream << one.name;
}
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const std::string level : kLevels) {
    for (const auto dtype : kDtypes) {
      const std::string name = level + "_" + dtype_name(dtype);
      all.push_back({name + "_sgd", with_scale(level, dtype), sgd(0.5)});
      all.push_back({name + "_fused_sgd", with_scale(level, dtype), fused_sgd(0.5)});
    }
  }
  return all;
}

class GradientsInTheModel : public testing::TestWithParam<Case> {
 protected:
  Training training() const { return {GetParam().options, GetParam().optimizer}; }
};

INSTANTIATE_TEST_SUITE_P(All, GradientsInTheModel, testing::ValuesIn(cases()),
                         [](const auto& tested) { return tested.param.name; });

TEST_P(GradientsInTheModel, AreWhatTheStepReads) {
  Training trained = training();
  trained.backward();
  std::vector<at::Tensor> seen;
  for (const at::Tensor& parameter : trained.model->parameters()) {
    ASSERT_TRUE(parameter.grad().defined());
    seen.push_back(parameter.grad().to(torch::kFloat));
  }
  const auto read = trained.grads();
  ASSERT_EQ(read.size(), seen.size());
  for (std::size_t i = 0; i < seen.size(); ++i)
    expect_bitwise_equal(read[i].to(torch::kFloat), seen[i]);
}

TEST_P(GradientsInTheModel, AreClippedByTorchsFunction) {
  Training trained = training();
  trained.backward(100);
  const double before = optim::grad_norm(trained.mixed->master_params(*trained.optimizer));
  ASSERT_GT(before, 1);
  trained.mixed->zero_grad(*trained.optimizer);
  trained.backward(100);
  const double norm = torch::nn::utils::clip_grad_norm_(trained.model->parameters(), 0.25);
  // LibTorch rounds the norm of a 16-bit gradient to 16 bits.
  const double tolerance = 8 * dtype_limits(torch::kBFloat16).epsilon;
  EXPECT_NEAR(norm, before, tolerance * before);
  EXPECT_NEAR(optim::grad_norm(trained.mixed->master_params(*trained.optimizer)), 0.25,
              tolerance * 0.25);
  EXPECT_EQ(trained.step(), Step::stepped);
}

// A loss so large that training diverges unless it is clipped.
TEST_P(GradientsInTheModel, KeepATrainingStableThatIsClippedByTorchsFunctions) {
  for (const bool by_value : {false, true}) {
    Training trained = training();
    double first = 0;
    double last = 0;
    int stepped = 0;
    for (int i = 0; i < 20; ++i) {
      trained.optimizer->zero_grad();
      const at::Tensor loss = trained.loss();
      trained.mixed->scale_loss(loss * 100, *trained.optimizer).backward();
      if (by_value)
        torch::nn::utils::clip_grad_value_(trained.model->parameters(), 0.05);
      else
        torch::nn::utils::clip_grad_norm_(trained.model->parameters(), 1.0);
      stepped += trained.step() == Step::stepped ? 1 : 0;
      (i == 0 ? first : last) = loss.item<double>();
    }
    EXPECT_LT(last, 0.5 * first) << by_value;
    EXPECT_GE(stepped, 15) << by_value;
  }
}

// Trains with gradients that the program keeps, and compares them with those of a training that
// does not.
// @param keep  sets the gradients of the parameters, and returns what zeroes them
void expect_kept_gradients(
    const std::function<std::function<void()>(torch::nn::Module& model)>& keep) {
  for (const std::string level : {"O0", "O1", "O3"}) {
    SCOPED_TRACE(level);
    const Options options =
        Options(level).dtype(torch::kHalf).loss_scale(level == "O0" ? "1" : "128");
    Training trained(options, sgd(0.5));
    Training want(options, sgd(0.5));
    const auto zero = keep(*trained.model);
    std::vector<at::Tensor> kept;
    for (const at::Tensor& parameter : trained.model->parameters())
      kept.push_back(parameter.grad());
    for (std::uint64_t i = 0; i < 2; ++i) {
      zero();
      trained.backward(1, i);
      want.mixed->zero_grad(*want.optimizer);
      want.backward(1, i);
      const auto own = trained.model->parameters();
      const auto others = want.model->parameters();
      for (std::size_t k = 0; k < kept.size(); ++k) {
        EXPECT_TRUE(own[k].grad().is_alias_of(kept[k]));
        expect_bitwise_equal(kept[k], others[k].grad());
      }
      trained.step();
      want.step();
    }
  }
}

// As in a program that sends all gradients as one tensor.
TEST(GradientsOfTheModel, StayInTheTensorThatTheProgramKeepsThemIn) {
  expect_kept_gradients([](torch::nn::Module& model) {
    const auto parameters = model.parameters();
    std::int64_t count = 0;
    for (const at::Tensor& parameter : parameters) count += parameter.numel();
    const at::Tensor flat = torch::zeros({count}, parameters[0].options());
    std::int64_t start = 0;
    for (const at::Tensor& parameter : parameters) {
      parameter.mutable_grad() = flat.narrow(0, start, parameter.numel()).view_as(parameter);
      start += parameter.numel();
    }
    return [flat] { flat.zero_(); };
  });
}

TEST(GradientsOfTheModel, StayInTheTensorsThatTheProgramKeeps) {
  expect_kept_gradients([](torch::nn::Module& model) {
    for (const at::Tensor& parameter : model.parameters())
      parameter.mutable_grad() = torch::zeros_like(parameter);
    return [&model] { model.zero_grad(/*set_to_none=*/false); };
  });
}

// Autograd gives both parameters a gradient in the same memory.
TEST(GradientsOfTheModel, OfTwoParametersInOneMemoryAreSumsOfTheirOwn) {
  const auto train = [](const Options& options) {
    torch::nn::Module model;
    const auto first = model.register_parameter("first", torch::ones({2, 3}));
    const auto second = model.register_parameter("second", torch::ones({6}));
    torch::optim::SGD optimizer(model.parameters(), 0.5);
    auto mixed = initialize(model, optimizer, Options(options).verbosity(0));
    (first + second.view({2, 3})).sum().backward();
    mixed.scale_loss(first.sum() * 3, optimizer).backward();
    return std::vector<at::Tensor>{first.grad().clone(), second.grad().clone()};
  };
  const auto grads = train(Options("O1").dtype(torch::kHalf).loss_scale("128"));
  expect_bitwise_equal(grads[0], torch::full({2, 3}, 4.));
  expect_bitwise_equal(grads[1], torch::ones({6}));
}

// One of them is not the optimizer's, and is unscaled in a pass of its own.
TEST(GradientsOfTheModel, InOneMemoryAreUnscaledOnce) {
  const auto train = [](const std::string& scale) {
    torch::nn::Module model;
    const auto word = model.register_parameter("word", torch::ones({2, 3}));
    const auto position = model.register_parameter("position", torch::ones({2, 3}));
    torch::optim::SGD optimizer(std::vector<at::Tensor>{word}, 0.5);
    auto mixed = initialize(model, optimizer,
                            Options("O1").dtype(torch::kHalf).loss_scale(scale).verbosity(0));
    const at::Tensor x = torch::arange(12.F).view({2, 2, 3});
    mixed.scale_loss((x * (word.unsqueeze(0) + position.unsqueeze(0))).sum(), optimizer).backward();
    return std::vector<at::Tensor>{word.grad().clone(), position.grad().clone()};
  };
  expect_bitwise_equal(train("128"), train("1"));
}

// The next pass adds to the gradients that the program does not zero.
TEST(GradientsOfTheModel, InOneMemoryAreAddedToOnce) {
  torch::nn::Module model;
  const auto word = model.register_parameter("word", torch::ones({2, 3}));
  const auto position = model.register_parameter("position", torch::ones({2, 3}));
  torch::optim::SGD optimizer(std::vector<at::Tensor>{word}, 0.5);
  auto mixed = initialize(model, optimizer, Options("O2").dtype(torch::kBFloat16).verbosity(0));
  const at::Tensor x = torch::arange(12.F).view({2, 2, 3}).to(torch::kBFloat16);
  for (int step = 0; step < 3; ++step) {
    const at::Tensor sum = word.unsqueeze(0) + position.unsqueeze(0);
    mixed.scale_loss((x * sum).to(torch::kFloat).sum(), optimizer).backward();
    const at::Tensor grad = mixed.master_params(optimizer).begin()->grad();
    expect_bitwise_equal(grad, x.sum(0).to(torch::kFloat));
    mixed.zero_grad(optimizer);
  }
}

// Parts of one gradient, of which no two begin at the same address.
TEST(GradientsOfTheModel, ThatOverlapAreUnscaledOnce) {
  torch::nn::Module model;
  const auto whole = model.register_parameter("whole", torch::ones({2, 3}));
  const auto first = model.register_parameter("first", torch::ones({2}));
  const auto second = model.register_parameter("second", torch::ones({4}));
  torch::optim::SGD optimizer(model.parameters(), 0.5);
  auto mixed = initialize(model, optimizer,
                          Options("O1").dtype(torch::kHalf).loss_scale(128.0).verbosity(0));
  const at::Tensor x = torch::arange(6.F);
  mixed.scale_loss((x * (whole.view({6}) + torch::cat({first, second}))).sum(), optimizer)
      .backward();
  expect_bitwise_equal(whole.grad(), x.view({2, 3}));
  expect_bitwise_equal(first.grad(), x.narrow(0, 0, 2));
  expect_bitwise_equal(second.grad(), x.narrow(0, 2, 4));
}

// They are in 16 bits, and the masters' in fp32.
TEST(GradientsOfTheModel, AreWarnedOfIfTheProgramKeepsThemAndThereAreMasters) {
  auto model = make_net();
  torch::optim::SGD optimizer(model->parameters(), 0.5);
  auto mixed = initialize(model, optimizer, Options("O2").dtype(torch::kHalf).loss_scale("128"));
  const auto train = [&] {
    mixed.scale_loss(mixed.forward(model, torch::ones({4, 12})).sum(), optimizer).backward();
    mixed.step(optimizer);
  };
  const test::CapturedLog log;
  train();
  train();
  EXPECT_EQ(log.text(), "");
  std::vector<at::Tensor> kept;
  for (const at::Tensor& parameter : model->parameters())
    kept.push_back(parameter.mutable_grad() = torch::zeros_like(parameter));
  train();
  EXPECT_THAT(log.text(), testing::HasSubstr("take parameter.grad() again"));
}

// Between forward and backward, as GANs do for the gradients that the other loss has left.
TEST_P(GradientsInTheModel, MayBeZeroedAfterAForwardPass) {
  for (const bool in_place : {false, true}) {
    SCOPED_TRACE(in_place);
    Training trained = training();
    Training want = training();
    trained.backward(7, 3);
    const at::Tensor loss = trained.loss();
    trained.model->zero_grad(/*set_to_none=*/!in_place);
    trained.mixed->scale_loss(loss, *trained.optimizer).backward();
    want.backward();
    const auto got = trained.grads();
    const auto expected = want.grads();
    for (std::size_t i = 0; i < got.size(); ++i) expect_bitwise_equal(got[i], expected[i]);
  }
}

TEST_P(GradientsInTheModel, AreClippedAfterAForwardPassToo) {
  Training trained = training();
  trained.backward(100);
  trained.loss(2);  // to look at it
  torch::nn::utils::clip_grad_norm_(trained.model->parameters(), 0.25);
  const double tolerance = 8 * dtype_limits(torch::kBFloat16).epsilon;
  EXPECT_NEAR(optim::grad_norm(trained.mixed->master_params(*trained.optimizer)), 0.25,
              tolerance * 0.25);
}

// optimizer.step() is allowed with a scale of 1; gradients that the model keeps do not add up.
TEST(GradientsOfTheModel, DoNotAddUpInALoopThatZeroesThemAfterForward) {
  for (const std::string level : kLevels) {
    SCOPED_TRACE(level);
    const Options options = Options(level).dtype(torch::kBFloat16);
    Training trained(options, sgd(0.5));
    Training want(options, sgd(0.5));
    for (std::uint64_t i = 0; i < 3; ++i) {
      const at::Tensor loss = trained.loss(i);
      trained.model->zero_grad();
      trained.mixed->scale_loss(loss, *trained.optimizer).backward();
      trained.optimizer->step();
      want.mixed->zero_grad(*want.optimizer);
      want.backward(1, i);
      want.optimizer->step();
    }
    const auto got = trained.masters();
    const auto expected = want.masters();
    for (std::size_t j = 0; j < got.size(); ++j) expect_bitwise_equal(got[j], expected[j]);
  }
}

// As in a program that averages gradients over ranks itself.
TEST_P(GradientsInTheModel, MayBeChangedInPlaceOrReplaced) {
  for (const bool in_place : {true, false}) {
    SCOPED_TRACE(in_place ? "in place" : "replaced");
    Training changed = training();
    Training halved = training();
    for (int i = 0; i < 2; ++i) {
      changed.optimizer->zero_grad();
      halved.optimizer->zero_grad();
      changed.backward();
      halved.backward();
      for (const at::Tensor& parameter : changed.model->parameters()) {
        if (in_place)
          parameter.grad().data().div_(2);  // past version counters, too
        else
          parameter.mutable_grad() = parameter.grad() / 2;
      }
      for (const at::Tensor& master : halved.mixed->master_params(*halved.optimizer))
        master.grad().div_(2);
      EXPECT_EQ(changed.step(), Step::stepped);
      EXPECT_EQ(halved.step(), Step::stepped);
    }
    const auto got = changed.masters();
    const auto want = halved.masters();
    for (std::size_t i = 0; i < want.size(); ++i) expect_bitwise_equal(got[i], want[i]);
  }
}

TEST_P(GradientsInTheModel, AreDroppedOnBothSides) {
  for (const bool by_model : {true, false}) {
    for (const bool set_to_none : {true, false}) {
      SCOPED_TRACE(testing::Message() << by_model << set_to_none);
      Training trained = training();
      Training once = training();
      const auto zero = [&] {
        if (by_model)
          trained.model->zero_grad(set_to_none);
        else
          trained.optimizer->zero_grad(set_to_none);
      };
      trained.backward(1, 1);
      zero();
      once.loss(1);  // BatchNorm sees it
      trained.backward(1, 2);
      once.backward(1, 2);
      const auto got = trained.grads();
      const auto want = once.grads();
      for (std::size_t i = 0; i < want.size(); ++i) expect_close(got[i], want[i], 1e-6);
    }
  }
}

// The next forward removes them, so that a backward without scale_loss adds to nothing.
TEST_P(GradientsInTheModel, AreNotAddedToTwice) {
  Training trained = training();
  trained.backward(1, 1);
  const auto first = trained.grads();
  trained.loss(2).backward();
  trained.backward(1, 3);
  Training parts = training();
  std::vector<std::vector<at::Tensor>> each;
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    parts.mixed->zero_grad(*parts.optimizer);
    parts.backward(1, seed);
    each.push_back(parts.grads());
  }
  const auto got = trained.grads();
  for (std::size_t i = 0; i < got.size(); ++i) {
    const at::Tensor want = (each[0][i].to(torch::kDouble) + each[1][i].to(torch::kDouble) +
                             each[2][i].to(torch::kDouble));
    // fp16 without a scale loses small parts.
    const double tolerance =
        GetParam().name.rfind("O0", 0) == 0 ? 1e-5 : 8 * dtype_limits(torch::kBFloat16).epsilon;
    EXPECT_LE(
        (got[i].to(torch::kDouble) - want).norm().item<double>(),
        tolerance * (each[0][i].norm() + each[1][i].norm() + each[2][i].norm()).item<double>());
  }
}

// Another forward of the same model, before the step, does not undo the clipping.
TEST_P(GradientsInTheModel, StayClippedThroughAForward) {
  Training trained = training();
  trained.backward(100);
  torch::nn::utils::clip_grad_norm_(trained.model->parameters(), 0.25);
  trained.loss(2);
  EXPECT_NEAR(optim::grad_norm(trained.mixed->master_params(*trained.optimizer)), 0.25, 0.02);
}

// A filter in the frequency domain.
struct FilterImpl : torch::nn::Module {
  FilterImpl() {
    weight = register_parameter("weight", torch::randn({9}, torch::kComplexFloat));
    register_module("out", out);
  }
  at::Tensor forward(const at::Tensor& x) {
    return out(
        torch::fft_irfft(torch::fft_rfft(x.to(torch::kFloat)) * weight, 16).to(x.scalar_type()));
  }
  at::Tensor weight;
  torch::nn::Linear out{16, 3};
};
TORCH_MODULE(Filter);

struct FilterTraining {
  explicit FilterTraining(const Options& options) {
    torch::manual_seed(5);
    model = Filter();
    optimizer = std::make_unique<torch::optim::SGD>(model->parameters(), 0.1);
    mixed = std::make_unique<MixedPrecision>(
        initialize(model, *optimizer, Options(options).verbosity(0)));
  }
  void backward() {
    torch::manual_seed(6);
    mixed->scale_loss(mixed->forward(model, torch::randn({8, 16})).pow(2).mean(), *optimizer)
        .backward();
  }
  Filter model{nullptr};
  std::unique_ptr<torch::optim::SGD> optimizer;
  std::unique_ptr<MixedPrecision> mixed;
};

TEST(ComplexParameters, TrainAtEveryLevel) {
  FilterTraining plain{Options("O0")};
  for (int i = 0; i < 2; ++i) plain.backward();
  const at::Tensor want = plain.model->weight.grad();
  for (const std::string level : kLevels) {
    for (const auto dtype : kDtypes) {
      SCOPED_TRACE(level + " " + dtype_name(dtype));
      FilterTraining trained(scaled_by(level, dtype, level == "O0" ? "1" : "128"));
      for (int i = 0; i < 2; ++i) trained.backward();
      const at::Tensor got = trained.model->weight.grad();
      ASSERT_EQ(got.scalar_type(), torch::kComplexFloat);
      EXPECT_LE((got - want).abs().max().item<double>(),
                8 * dtype_limits(dtype).epsilon * want.abs().max().item<double>());
      const at::Tensor before = trained.model->weight.detach().clone();
      EXPECT_EQ(trained.mixed->step(*trained.optimizer), Step::stepped);
      EXPECT_FALSE(trained.model->weight.equal(before));
      if (level == "O0") continue;
      trained.mixed->zero_grad(*trained.optimizer);
      trained.backward();
      auto scaled =
          trained.mixed->scale_loss(trained.model->weight.abs().sum() * kInf, *trained.optimizer);
      scaled.backward();
      EXPECT_EQ(trained.mixed->step(*trained.optimizer), Step::skipped);
    }
  }
}

// A penalty on unscaled gradients has unscaled gradients.
TEST(ComplexParameters, HaveSecondDerivatives) {
  const auto penalised = [](const char* scale) {
    FilterTraining trained(scaled_by("O1", torch::kHalf, scale));
    trained.mixed->scale_loss(trained.model->weight.abs().pow(4).sum(), *trained.optimizer)
        .backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    const at::Tensor penalty = trained.model->weight.grad().abs().pow(2).sum();
    trained.model->weight.mutable_grad() = at::Tensor();
    trained.mixed->scale_loss(penalty, *trained.optimizer).backward();
    return trained.model->weight.grad().detach();
  };
  const at::Tensor want = penalised("1");
  EXPECT_LE((penalised("128") - want).abs().max().item<double>(),
            1e-5 * want.abs().max().item<double>());
}

TEST(ComplexParameters, AreClippedAsByTorch) {
  for (const double order : {2.0, 1.0, 3.0, std::numeric_limits<double>::infinity()}) {
    SCOPED_TRACE(order);
    FilterTraining ours{Options("O0")};
    FilterTraining torchs{Options("O0")};
    ours.backward();
    torchs.backward();
    const double norm = optim::clip_grad_norm_(ours.model->parameters(), 0.01, order);
    EXPECT_NEAR(norm, torch::nn::utils::clip_grad_norm_(torchs.model->parameters(), 0.01, order),
                1e-5 * norm);
    EXPECT_GT(norm, 0.01);
    for (std::size_t i = 0; i < ours.model->parameters().size(); ++i) {
      const at::Tensor want = torchs.model->parameters()[i].grad();
      EXPECT_LE((ours.model->parameters()[i].grad() - want).abs().max().item<double>(),
                1e-5 * want.abs().max().item<double>());
    }
    FilterTraining mixed{Options("O1")};
    mixed.backward();
    EXPECT_GT(mixed.mixed->clip_grad_norm_(*mixed.optimizer, 0.01, order), 0.01);
    EXPECT_NEAR(optim::grad_norm(mixed.model->parameters(), order), 0.01, 1e-4);
  }
}

TEST(ComplexParameters, AreUnscaledByAGradScaler) {
  torch::manual_seed(5);
  Filter model;
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  GradScaler scaler;
  const auto loss = [&] { return model->forward(torch::ones({2, 16})).pow(2).mean(); };
  loss().backward();
  const at::Tensor want = model->weight.grad().clone();
  optimizer.zero_grad();
  scaler.scale(loss()).backward();
  scaler.unscale_(optimizer);
  EXPECT_LE((model->weight.grad() - want).abs().max().item<double>(),
            1e-6 * want.abs().max().item<double>());
  EXPECT_EQ(scaler.step(optimizer), Step::stepped);
}

}  // namespace
}  // namespace semitone::amp::training_idioms_test
