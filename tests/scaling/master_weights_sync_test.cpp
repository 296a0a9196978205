// Masters of shared, frozen and later parameters, and changes on either side.

#include "semitone/core/error.h"
#include "semitone/scaling/master_weights.h"
#include "src/scaling/masters.h"
#include "tests/scaling/master_weights_fixture.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <sstream>
#include <utility>
#include <vector>

namespace semitone::amp::master_weights_test {
namespace {

using test::message_of;
using test::near;
using test::same_bits;
using testing::HasSubstr;

TEST(MasterWeights, AParameterThatStandsTwiceHasOneMaster) {
  const auto weight = torch::ones({1}, torch::kBFloat16).requires_grad_(true);
  torch::optim::SGD optimizer({weight, weight}, 0.25);
  MasterWeights masters(optimizer);
  EXPECT_EQ(masters.size(), 1U);
  EXPECT_TRUE(in_group(optimizer, 0, 0).is_same(in_group(optimizer, 0, 1)));
  weight.mutable_grad() = torch::ones({1}, torch::kBFloat16);
  masters.take_gradients();
  optimizer.step();
  masters.write_model();
  EXPECT_EQ(weight.item<float>(), 0.5F);  // LibTorch steps it twice, as it does in fp32
}

TEST(MasterWeights, ParametersThatShareMemoryHaveMastersThatDo) {
  const auto train = [](c10::ScalarType dtype) {
    const auto first = torch::ones({2}, dtype).requires_grad_(true);
    const auto second = first.variable_data().requires_grad_(true);
    torch::optim::SGD optimizer({first, second}, 0.25);
    MasterWeights masters(optimizer);
    for (int i = 0; i < 2; ++i) {
      optimizer.zero_grad();
      first.mutable_grad() = torch::ones({2}, dtype);
      second.mutable_grad() = torch::full({2}, 0.5, dtype);
      masters.take_gradients();
      optimizer.step();
      masters.write_model();
    }
    EXPECT_EQ(first.const_data_ptr(), second.const_data_ptr());
    return first.to(torch::kFloat);
  };
  EXPECT_TRUE(same_bits(train(torch::kBFloat16), train(torch::kFloat)));
}

TEST(MasterWeights, AChangeOfAParameterIsOneOfThoseThatShareItsMemory) {
  const auto first = torch::ones({4}, torch::kBFloat16).requires_grad_(true);
  const auto second = first.variable_data().requires_grad_(true);
  torch::optim::SGD optimizer({first, second}, 0.25);
  MasterWeights masters(optimizer);
  first.mutable_grad() = torch::ones({4}, torch::kBFloat16);
  masters.take_gradients();
  const torch::NoGradGuard no_grad;
  first.clamp_(-0.5, 0.5);
  masters.sync();
  EXPECT_TRUE(same_bits(masters.master_of(first), torch::full({4}, 0.5F)));
  EXPECT_TRUE(same_bits(masters.master_of(second), torch::full({4}, 0.5F)));
}

TEST(MasterWeights, AParameterThatIsFrozenNoMoreGetsAMasterAtSync) {
  const auto weight = parameter({2}).requires_grad_(false);
  torch::optim::SGD optimizer({parameter({3}), weight}, 0.1);
  MasterWeights masters(optimizer);
  EXPECT_EQ(masters.size(), 1U);
  masters.sync();
  EXPECT_EQ(masters.size(), 1U);
  weight.requires_grad_(true);
  masters.sync();
  EXPECT_EQ(masters.size(), 2U);
  EXPECT_TRUE(masters.master_of(weight).is_same(in_group(optimizer, 0, 1)));
}

TEST(MasterWeights, GroupsAddedLaterGetMastersAtSync) {
  torch::optim::SGD optimizer({parameter({3})}, torch::optim::SGDOptions(0.1).momentum(0.9));
  MasterWeights masters(optimizer);
  const auto weight = parameter({2});
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({weight}));
  masters.sync();
  EXPECT_EQ(masters.size(), 2U);
  weight.mutable_grad() = torch::ones({2}, torch::kBFloat16);
  EXPECT_FALSE(masters.take_gradients());
  const auto before = weight.clone();
  optimizer.step();
  masters.write_model();
  EXPECT_FALSE(same_bits(weight, before));
}

// Another optimizer trains it then.
TEST(MasterWeights, AParameterThatLeavesTheOptimizerHasNoMaster) {
  const auto one = [] { return torch::ones({2}, torch::kBFloat16).requires_grad_(); };
  const auto moved = one();
  const auto kept = one();
  const auto other = one();
  torch::optim::SGD first({moved, kept}, torch::optim::SGDOptions(0.5).momentum(0.5));
  torch::optim::SGD second({other}, 0.25);
  MasterWeights first_masters(first);
  MasterWeights second_masters(second);
  const auto step = [&](bool reversed) {
    (moved.sum() + kept.sum() + other.sum()).backward();
    std::vector<std::pair<torch::optim::SGD*, MasterWeights*>> order{{&first, &first_masters},
                                                                     {&second, &second_masters}};
    if (reversed) std::swap(order[0], order[1]);
    for (const auto& [optimizer, masters] : order) {
      masters->take_gradients();
      optimizer->step();
      masters->write_model();
      masters->clear_gradients();
    }
  };
  step(false);
  EXPECT_TRUE(same_bits(moved, torch::full({2}, 0.5, torch::kBFloat16)));

  auto& places = first.param_groups()[0].params();
  places.erase(places.begin());
  second.add_param_group(torch::optim::OptimizerParamGroup({moved}));
  second_masters.sync();
  for (const bool reversed : {false, true}) step(reversed);
  EXPECT_TRUE(same_bits(moved, torch::zeros({2}, torch::kBFloat16)));
  EXPECT_EQ(first_masters.size(), 1U);
  EXPECT_EQ(second_masters.size(), 2U);
  EXPECT_FALSE(first_masters.has(moved));  // another value
  EXPECT_TRUE(second_masters.has(moved));
}

// Its exact value and its state stay.
TEST(MasterWeights, AParameterThatComesBackIsAsItLeft) {
  for (const bool as_group : {false, true}) {
    SCOPED_TRACE(as_group ? "the group itself" : "the parameter in a new group");
    const auto weight = parameter({4});
    torch::optim::SGD optimizer({parameter({3})}, torch::optim::SGDOptions(0.001).momentum(0.9));
    optimizer.add_param_group(torch::optim::OptimizerParamGroup({weight}));
    MasterWeights masters(optimizer);
    const auto step = [&] {
      weight.mutable_grad() = torch::ones({4}, torch::kBFloat16);
      masters.take_gradients();
      optimizer.step();
      masters.write_model();
      masters.clear_gradients();
    };
    step();
    const at::Tensor exact = masters.master_of(weight).detach().clone();
    ASSERT_FALSE(same_bits(exact, weight.detach().to(torch::kFloat)));
    const auto group = optimizer.param_groups().back();
    optimizer.param_groups().pop_back();
    step();
    EXPECT_EQ(masters.size(), 1U);
    EXPECT_TRUE(weight.grad().defined()) << "the gradient of a parameter that is not trained";
    EXPECT_TRUE(same_bits(masters.master_of(weight).detach(), exact));
    if (as_group) {
      optimizer.param_groups().push_back(group);
    } else {
      optimizer.add_param_group(torch::optim::OptimizerParamGroup({weight}));
    }
    step();  // without sync()
    EXPECT_EQ(masters.size(), 2U);
    // The momentum of the first step counts.
    test::expect_close(masters.master_of(weight).detach(), exact - 0.001 * 1.9,
                       test::reduction_tolerance(torch::kFloat, 4));
    EXPECT_TRUE(same_bits(weight.detach(), rounded(masters.master_of(weight), weight)));
  }
}

TEST(MasterWeights, AParameterThatWasChangedMeanwhileComesBackAsItIs) {
  const auto weight = parameter({4});
  torch::optim::SGD optimizer({parameter({3})}, 0.5);
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({weight}));
  MasterWeights masters(optimizer);
  const auto group = optimizer.param_groups().back();
  optimizer.param_groups().pop_back();
  masters.sync();
  {
    const torch::NoGradGuard no_grad;
    weight.fill_(3);
  }
  EXPECT_FALSE(masters.has(weight));
  optimizer.param_groups().push_back(group);
  weight.mutable_grad() = torch::ones({4}, torch::kBFloat16);
  masters.take_gradients();
  masters.step();
  EXPECT_TRUE(same_bits(weight.detach(), torch::full({4}, 2.5, torch::kBFloat16)));
}

TEST(MasterWeights, ChangedParametersGiveTheirValuesToTheirMasters) {
  const torch::NoGradGuard no_grad;
  const std::vector<std::function<void(const at::Tensor&)>> changes{
      [](const at::Tensor& weight) { weight.copy_(torch::full({4}, 3)); },
      [](const at::Tensor& weight) { weight.set_data(torch::full({4}, 5, torch::kBFloat16)); },
      [](const at::Tensor& weight) { torch::nn::init::normal_(weight); },
      [](const at::Tensor& weight) { weight[2] = 7; },
      // These change no version.
      [](const at::Tensor& weight) { weight.data().copy_(torch::full({4}, 3)); },
      [](const at::Tensor& weight) { weight.data().clamp_(-0.01, 0.01); },
      [](const at::Tensor& weight) {
        for (int i = 0; i < 4; ++i) weight.mutable_data_ptr<at::BFloat16>()[i] = 0.5;
      },
  };
  for (const auto& change : changes) {
    Pair pair;
    change(pair.weight);
    const auto expected = pair.weight.clone();
    pair.masters.sync();
    EXPECT_TRUE(same_bits(pair.master, expected.to(torch::kFloat)));
    EXPECT_TRUE(same_bits(pair.weight, expected));
  }
}

TEST(MasterWeights, LoadedModelsGiveTheirValuesToTheMasters) {
  torch::nn::Linear source(3, 2);
  torch::nn::Linear model(3, 2);
  source->to(torch::kBFloat16);
  model->to(torch::kBFloat16);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  MasterWeights masters(optimizer);
  std::stringstream file;
  torch::save(source, file);
  torch::load(model, file);
  masters.sync();
  EXPECT_TRUE(same_bits(model->weight, source->weight));
  EXPECT_TRUE(same_bits(masters.master_of(model->weight), model->weight.to(torch::kFloat)));
}

TEST(MasterWeights, ChangedMastersAreRoundedIntoTheirParameters) {
  const torch::NoGradGuard no_grad;
  Pair pair;
  pair.master.copy_(torch::full({4}, 1.001F));
  pair.masters.pull();
  EXPECT_FALSE(near(pair.weight, torch::ones({4}), 0.01));
  pair.masters.sync();
  EXPECT_TRUE(same_bits(pair.weight, torch::ones({4}, torch::kBFloat16)));
  EXPECT_TRUE(same_bits(pair.master, torch::full({4}, 1.001F)));
}

TEST(MasterWeights, WhereBothSidesChangedTheParameterWins) {
  const torch::NoGradGuard no_grad;
  Pair pair;
  pair.master.fill_(1);
  pair.weight.fill_(2);
  pair.masters.sync();
  EXPECT_EQ(pair.master[0].item<float>(), 2);
  EXPECT_EQ(pair.weight[0].item<float>(), 2);
}

// The change is of the weights before the step, which would be lost.
TEST(MasterWeights, AChangeBetweenAStepAndItsCopyToTheModelIsAnError) {
  using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;
  const std::vector<Make> makes{
      [](auto parameters) { return std::make_unique<torch::optim::SGD>(parameters, 0.25); },
      [](auto parameters) {
        return std::make_unique<torch::optim::SGD>(parameters,
                                                   torch::optim::SGDOptions(0.25).momentum(0.9));
      },
      [](auto parameters) { return std::make_unique<torch::optim::Adam>(parameters, 0.25); },
      [](auto parameters) { return std::make_unique<torch::optim::RMSprop>(parameters, 0.25); }};
  for (std::size_t i = 0; i < makes.size(); ++i) {
    SCOPED_TRACE(i);
    const auto weight = torch::ones({5, 3}, torch::kBFloat16).requires_grad_(true);
    const auto optimizer = makes[i]({weight});
    MasterWeights masters(*optimizer);
    const auto with_gradient = [&] {
      weight.mutable_grad() = torch::ones({5, 3}, torch::kBFloat16);
      masters.take_gradients();
    };
    const auto clamp = [&] {
      const torch::NoGradGuard no_grad;
      weight.clamp_(-0.5, 0.5);
    };
    with_gradient();
    clamp();
    masters.sync();  // before the step
    EXPECT_TRUE(same_bits(masters.master_of(weight), torch::full({5, 3}, 0.5F)));
    optimizer->step();
    const auto stepped = masters.master_of(weight).clone();
    clamp();
    const auto message = message_of<Error>([&] { masters.sync(); });
    EXPECT_THAT(message, HasSubstr("mixed.step(optimizer)"));
    EXPECT_THAT(message_of<Error>([&] { masters.pull(); }), HasSubstr("fp32_weights(model)"));
    EXPECT_TRUE(same_bits(masters.master_of(weight), stepped));
    masters.write_model();
    EXPECT_TRUE(same_bits(weight, rounded(stepped, weight)));

    // Updated by sync instead.
    with_gradient();
    optimizer->step();
    masters.sync();
    clamp();
    masters.sync();
    // Other weights instead, as torch::load sets them.
    with_gradient();
    optimizer->step();
    weight.set_data(torch::full({5, 3}, 7, torch::kBFloat16));
    masters.sync();
    EXPECT_TRUE(same_bits(masters.master_of(weight), torch::full({5, 3}, 7.F)));
  }
}

TEST(MasterWeights, SyncTouchesNothingWhenNothingHappened) {
  Pair pair;
  const auto parameter_version = pair.weight._version();
  const auto master_version = pair.master._version();
  const auto master = pair.master.clone();
  pair.masters.sync();
  pair.masters.sync();
  EXPECT_EQ(pair.weight._version(), parameter_version);
  EXPECT_EQ(pair.master._version(), master_version);
  EXPECT_TRUE(same_bits(pair.master, master));
}

TEST(MasterWeights, ValuesBetweenSixteenBitNumbersAreNotLostBySync) {
  const torch::NoGradGuard no_grad;
  Pair pair;
  pair.masters.set(pair.weight, torch::full({4}, 1.001F));
  pair.masters.sync();
  EXPECT_TRUE(same_bits(pair.master, torch::full({4}, 1.001F)));
}

TEST(MasterWeights, SyncBetweenForwardAndBackwardKeepsTheGraphGood) {
  const auto weight = parameter({4});
  torch::optim::SGD optimizer({weight}, 0.1);
  MasterWeights masters(optimizer);
  const auto first = weight.pow(2).sum();
  const auto second = weight.pow(3).sum();
  first.backward();
  masters.take_gradients();
  masters.sync();
  EXPECT_NO_THROW(second.backward());
}

// Two losses, of which the first trains only one of the models.
TEST(MasterWeights, StepsChangeNoWeightWithoutAGradient) {
  for (const bool in_one_pass : {false, true}) {
    SCOPED_TRACE(in_one_pass);
    const auto trained = parameter({4});
    const auto other = parameter({4});
    torch::optim::AdamW optimizer({trained, other}, 0.1);
    Masters masters(optimizer);
    const auto loss = other.pow(2).sum();
    trained.pow(2).sum().backward();
    masters.take_gradients();
    const auto before = trained.detach().clone();
    masters.step(in_one_pass);
    EXPECT_FALSE(same_bits(trained, before));
    EXPECT_NO_THROW(loss.backward());
  }
}

TEST(MasterWeights, SetChangesBothSides) {
  Pair pair;
  pair.masters.set(pair.weight, torch::full({4}, 1.001F));
  EXPECT_TRUE(same_bits(pair.master, torch::full({4}, 1.001F)));
  EXPECT_TRUE(same_bits(pair.weight, torch::ones({4}, torch::kBFloat16)));
  EXPECT_TRUE(pair.master.requires_grad());
  EXPECT_THAT(message_of<Error>([&] { pair.masters.set(parameter({4}), torch::ones({4})); }),
              HasSubstr("[amp.master_weights.set] expected a parameter that has a master"));
}

TEST(MasterWeights, AnOverflowIsFoundUntilItsGradientsAreZeroed) {
  Pair pair;
  const auto take = [&](float gradient) {
    pair.weight.mutable_grad() = torch::full({4}, gradient, torch::kBFloat16);
    return pair.masters.take_gradients();
  };
  EXPECT_TRUE(take(std::numeric_limits<float>::infinity()));
  EXPECT_TRUE(take(1)) << "added to inf";
  pair.master.mutable_grad().reset();
  EXPECT_FALSE(take(1));
  EXPECT_FALSE(take(1));
}

TEST(MasterWeights, MovedOnesGoOn) {
  Pair pair;
  MasterWeights moved = std::move(pair.masters);
  pair.weight.mutable_grad() = torch::ones({4}, torch::kBFloat16);
  EXPECT_FALSE(moved.take_gradients());
  EXPECT_TRUE(pair.master.grad().defined());
}

}  // namespace
}  // namespace semitone::amp::master_weights_test
