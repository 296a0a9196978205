#include "semitone/optim/exponential_moving_average.h"

#include "semitone/core/error.h"
#include "tests/support/archive.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"
#include "tests/support/toy_nets.h"

#include <torch/csrc/jit/api/module.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace semitone::optim {
namespace {

using test::copies;
using test::expect_error;
using test::message_of;
using test::same_bits;
using test::saved;
using test::ToyNet;

ToyNet make_net(std::uint64_t seed = 3) {
  torch::manual_seed(seed);
  return test::odd_net();
}

// Changes all parameters, as a step would.
void change(const torch::nn::Module& model) {
  const torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : model.parameters())
    parameter.add_(torch::randn_like(parameter), 0.1);
}

std::vector<at::Tensor> averages_of(ExponentialMovingAverage& ema, const torch::nn::Module& model) {
  const auto averaged = ema.apply();
  return copies(model.parameters());
}

// Nothing can write to one.
TEST(ExponentialMovingAverage, LeavesOutExpandedBuffers) {
  torch::nn::Module model;
  model.register_parameter("weight", torch::ones({2}));
  const at::Tensor shift = model.register_buffer("shift", torch::ones({1}).expand({8}));
  const at::Tensor mean = model.register_buffer("mean", torch::ones({2}));
  ExponentialMovingAverage ema(model, ExponentialMovingAverageOptions(0.5).use_buffers(true));
  for (const int value : {0, 8}) {
    mean.fill_(value);
    ema.update();
  }
  const auto averaged = ema.apply();
  EXPECT_TRUE(torch::equal(shift, torch::ones({8})));
  EXPECT_LT(mean[0].item<float>(), 8);
}

TEST(ExponentialMovingAverage, EqualsALoopOverTheParameters) {
  const ToyNet net = make_net();
  ExponentialMovingAverage ema(*net, 0.9);
  std::vector<at::Tensor> bits;   // with the operator that the header names
  std::vector<at::Tensor> exact;  // the textbook's formula in fp64
  for (int step = 0; step < 20; ++step) {
    change(*net);
    ema.update();
    const auto parameters = net->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor now = parameters[i].detach();
      if (step == 0) {
        bits.push_back(now.clone());
        exact.push_back(now.to(torch::kDouble));
        continue;
      }
      bits[i] = torch::lerp(bits[i], now, 1 - 0.9);
      exact[i] = 0.9 * exact[i] + 0.1 * now.to(torch::kDouble);
    }
  }
  EXPECT_EQ(ema.updates(), 20);
  EXPECT_TRUE(same_bits(averages_of(ema, *net), bits));
  EXPECT_TRUE(
      test::near(averages_of(ema, *net), exact, test::reduction_tolerance(torch::kFloat, 20)));
}

TEST(ExponentialMovingAverage, WarmUpForgetsTheFirstWeightsSoon) {
  struct OneImpl : torch::nn::Module {
    OneImpl() { register_parameter("weight", weight); }
    at::Tensor weight = torch::zeros({1}, torch::kDouble);
  } model;
  const auto set = [&](double value) { model.parameters()[0].detach().fill_(value); };
  ExponentialMovingAverage ema(model, ExponentialMovingAverageOptions(0.25).warmup(true));
  double expected = 0;
  for (int n = 0; n < 8; ++n) {
    set(n + 1.0);
    ema.update();
    const double decay = n == 0 ? 0 : std::min(0.25, (1.0 + n) / (10.0 + n));
    expected = decay * expected + (1 - decay) * (n + 1);
    EXPECT_NEAR(averages_of(ema, model)[0].item<double>(), expected, 1e-14) << n;
  }
}

// Also after a load: weights of the construction would stay in the average for 1 / (1 - decay)
// steps.
TEST(ExponentialMovingAverage, TheFirstUpdateCopiesTheWeights) {
  const ToyNet net = make_net();
  ExponentialMovingAverage ema(*net, 0.9999);
  EXPECT_TRUE(same_bits(averages_of(ema, *net), copies(net->parameters())));
  change(*net);
  ema.update();
  const auto loaded = copies(net->parameters());
  change(*net);
  EXPECT_TRUE(same_bits(averages_of(ema, *net), loaded));
}

TEST(ExponentialMovingAverage, AveragesTorchScriptModules) {
  torch::jit::Module script("script");
  script.register_parameter("weight", torch::ones({2, 3}), /*is_buffer=*/false);
  script.register_buffer("scale", torch::ones({3}));
  ExponentialMovingAverage parameters(script, 0.75);
  ExponentialMovingAverage all(script, ExponentialMovingAverageOptions(0.75).use_buffers(true));
  for (ExponentialMovingAverage* ema : {&parameters, &all}) ema->update();
  {
    const torch::NoGradGuard no_grad;
    script.attr("weight").toTensor().fill_(5);
    script.attr("scale").toTensor().fill_(5);
  }
  for (ExponentialMovingAverage* ema : {&parameters, &all}) {
    ema->update();
    const auto averaged = ema->apply();
    test::expect_bitwise_equal(script.attr("weight").toTensor().detach(),
                               torch::full({2, 3}, 2.0F));
    test::expect_bitwise_equal(script.attr("scale").toTensor(),
                               torch::full({3}, ema == &all ? 2.0F : 5.0F));
  }
}

TEST(ExponentialMovingAverage, GoesOnInTheWiderDtypeWhereLayersAreCast) {
  torch::nn::Linear wide(3, 2);
  torch::nn::Linear narrow(3, 2);
  const torch::nn::Sequential net(wide, narrow);
  ExponentialMovingAverage ema(*net, 0.75);
  ema.update();
  const auto first = copies(net->parameters());
  wide->to(torch::kDouble);
  narrow->to(torch::kBFloat16);
  change(*net);
  ema.update();
  EXPECT_EQ(ema.updates(), 2);
  const auto averages = averages_of(ema, *net);
  for (std::size_t i = 0; i < first.size(); ++i) {
    const at::Tensor weight = net->parameters()[i];
    ASSERT_EQ(averages[i].scalar_type(), weight.scalar_type());
    const at::Tensor want =
        torch::lerp(first[i].to(torch::kDouble), weight.to(torch::kDouble), 0.25);
    EXPECT_TRUE(test::near(averages[i], want,
                           test::rounding_tolerance(i < 2 ? torch::kFloat : torch::kBFloat16)))
        << i;
  }
}

TEST(ExponentialMovingAverage, GivesTheWeightsBackBitForBitAlsoAfterAnException) {
  const ToyNet net = make_net();
  ExponentialMovingAverage ema(*net, 0.5);
  ema.update();
  change(*net);
  const at::Tensor parameter = net->parameters()[0];
  parameter.detach().view(-1)[0] = std::numeric_limits<float>::quiet_NaN();
  parameter.detach().view(-1)[1] = -0.0F;
  const auto before = copies(net->parameters());
  try {
    const auto averaged = ema.apply();
    EXPECT_FALSE(same_bits(copies(net->parameters()), before));
    throw std::runtime_error("evaluation failed");
  } catch (const std::runtime_error&) {
  }
  EXPECT_TRUE(same_bits(copies(net->parameters()), before));
  EXPECT_TRUE(net->parameters()[0].is_same(parameter));
  ema.update();  // not applied any more
}

TEST(ExponentialMovingAverage, AWeightThatCannotBeSetDoesNotKeepTheOthersFromIt) {
  const ToyNet net = make_net();
  const at::Tensor weight = net->first->weight;
  ExponentialMovingAverage ema(*net, 0.5);
  ema.update();
  change(*net);
  const auto before = copies(net->parameters());
  const auto resize = [&] { weight.set_data(torch::zeros({2, 2})); };
  const auto expect_others_restored = [&] {
    const auto parameters = net->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].is_same(weight)) continue;
      test::expect_bitwise_equal(parameters[i].detach(), before[i]);
    }
  };
  {
    auto averaged = ema.apply();
    resize();
    message_of<c10::Error>([&] { averaged.end(); });
    expect_others_restored();
    expect_error([&] { ema.update(); }, {".update]", "averaged weights"});
    weight.set_data(torch::zeros({33, 9}));
    averaged.end();
    EXPECT_TRUE(same_bits(copies(net->parameters()), before));
  }
  {
    const auto averaged = ema.apply();
    resize();
  }
  expect_others_restored();
  weight.set_data(torch::zeros({33, 9}));
  ema.update();  // not applied any more
}

TEST(ExponentialMovingAverage, AnAppliedAverageOutlivesTheObjectThatMadeIt) {
  const ToyNet net = make_net();
  auto ema = std::make_unique<ExponentialMovingAverage>(*net, 0.5);
  ema->update();
  change(*net);
  const auto before = copies(net->parameters());
  {
    auto averaged = ema->apply();
    ema.reset();
    const auto moved = std::move(averaged);
    EXPECT_FALSE(same_bits(copies(net->parameters()), before));
  }
  EXPECT_TRUE(same_bits(copies(net->parameters()), before));
}

// Tied weights are one parameter, and views of one memory are restored to the same values.
TEST(ExponentialMovingAverage, RestoresWeightsThatShareMemory) {
  struct TiedImpl : torch::nn::Module {
    TiedImpl() {
      register_parameter("first", weight);
      register_parameter("again", weight);
      register_parameter("view", weight.detach().view({4}), false);
    }
    at::Tensor weight = torch::ones({2, 2});
  } model;
  ExponentialMovingAverage ema(model, 0.5);
  ema.update();
  model.weight.detach().fill_(3);
  ema.update();
  {
    const auto averaged = ema.apply();
    EXPECT_TRUE(same_bits(model.weight.detach(), torch::full({2, 2}, 2.0F)));
  }
  EXPECT_TRUE(same_bits(model.weight.detach(), torch::full({2, 2}, 3.0F)));
}

TEST(ExponentialMovingAverage, BuffersAreTheModelsOrAveraged) {
  const ToyNet net = make_net();
  ExponentialMovingAverage without(*net, 0.5);
  ExponentialMovingAverage with(*net, ExponentialMovingAverageOptions(0.5).use_buffers(true));
  const at::Tensor mean = net->norm->running_mean;
  const at::Tensor batches = net->norm->num_batches_tracked;
  for (const int value : {0, 8}) {
    mean.fill_(value);
    batches.fill_(value);
    without.update();
    with.update();
  }
  batches.fill_(9);
  {
    const auto averaged = without.apply();
    EXPECT_EQ(mean[0].item<float>(), 8);
    EXPECT_EQ(batches.item<std::int64_t>(), 9);
  }
  {
    const auto averaged = with.apply();
    EXPECT_EQ(mean[0].item<float>(), 4);
    EXPECT_EQ(batches.item<std::int64_t>(), 8);
  }
  EXPECT_EQ(mean[0].item<float>(), 8);
  EXPECT_EQ(batches.item<std::int64_t>(), 9);
}

TEST(ExponentialMovingAverage, SavesAndLoadsBitForBit) {
  const ToyNet net = make_net();
  ExponentialMovingAverage whole(*net, ExponentialMovingAverageOptions(0.9).warmup(true));
  auto empty = saved(whole);
  for (int step = 0; step < 3; ++step) {
    change(*net);
    whole.update();
  }
  auto file = saved(whole);
  ExponentialMovingAverage resumed(*net, ExponentialMovingAverageOptions(0.9).warmup(true));
  resumed.load(file);
  EXPECT_EQ(resumed.updates(), 3);
  change(*net);
  whole.update();
  resumed.update();
  EXPECT_TRUE(same_bits(averages_of(resumed, *net), averages_of(whole, *net)));
  resumed.load(empty);
  EXPECT_EQ(resumed.updates(), 0);
  EXPECT_TRUE(same_bits(averages_of(resumed, *net), copies(net->parameters())));
}

TEST(ExponentialMovingAverage, RefusesFilesOfOtherModelsAndChangesNothing) {
  const ToyNet net = make_net();
  ExponentialMovingAverage ema(*net, 0.9);
  ema.update();
  change(*net);
  const auto before = averages_of(ema, *net);
  const auto refused = [&](torch::serialize::InputArchive file) {
    const auto message = message_of<FileError>([&] { ema.load(file); });
    EXPECT_EQ(ema.updates(), 1);
    EXPECT_TRUE(same_bits(averages_of(ema, *net), before));
    return message;
  };
  const auto file_of = [](const torch::nn::Module& model) {
    ExponentialMovingAverage other(model);
    other.update();
    return saved(other);
  };
  EXPECT_NE(refused(file_of(*test::ToyNet())).find("6 tensors, got 4 tensors"), std::string::npos);
  const ToyNet wide(test::ToyNetOptions{.inputs = 8, .normalised = true});
  EXPECT_NE(refused(file_of(*wide)).find("'first.weight' of shape [33, 9], got"),
            std::string::npos);
  EXPECT_NE(refused(file_of(*test::ToyConvNet())).find("'first.weight', got 'conv.weight'"),
            std::string::npos);
  EXPECT_NE(refused(test::archived([](auto&) {})).find("'updates'"), std::string::npos);
  const auto negative = [](torch::serialize::OutputArchive& archive) {
    archive.write("updates", c10::IValue(std::int64_t{-1}));
  };
  EXPECT_NE(refused(test::archived(negative)).find("at least 0, got -1"), std::string::npos);
}

TEST(ExponentialMovingAverage, RefusesWrongUse) {
  const ToyNet net = make_net();
  expect_error([&] { ExponentialMovingAverage(*net, 1.5); }, {"decay in [0, 1]", "1.5"});
  expect_error([&] { ExponentialMovingAverage(*net, std::nan("")); }, {"decay", "nan"});
  expect_error([&] { ExponentialMovingAverage{*torch::nn::ReLU()}; }, {"with parameters", "none"});
  ExponentialMovingAverage ema(*net);
  ema.update();
  auto file = saved(ema);
  {
    const auto averaged = ema.apply();
    expect_error([&] { ema.update(); }, {".update]", "averaged weights", "end the scope"});
    expect_error([&] { const auto twice = ema.apply(); }, {".apply]", "averaged weights"});
    expect_error([&] { ema.load(file); }, {".load]", "averaged weights"});
    // A checkpoint would have the averages as the weights of the training.
    expect_error([&] { saved(ema); }, {".save]", "averaged weights", "end the scope"});
  }
  net->first->weight.set_data(torch::zeros({2, 2}));
  expect_error([&] { ema.update(); }, {"'first.weight' of shape [33, 9]", "[2, 2]"});
  EXPECT_EQ(ema.updates(), 1);
  const ExponentialMovingAverage moved = std::move(ema);
  expect_error([&] { ema.update(); }, {"moved from"});  // NOLINT(bugprone-use-after-move)
}

}  // namespace
}  // namespace semitone::optim
