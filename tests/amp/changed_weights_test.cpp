// Other actions of programs on a model and its optimizer: writing to weights, loading them,
// evaluating in inference mode, unfreezing, destroying the MixedPrecision.

#include "semitone/amp/initialize.h"
#include "semitone/optim/exponential_moving_average.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/optim/fused_sgd.h"
#include "semitone/weights/state_dict.h"
#include "tests/support/errors.h"
#include "tests/support/optimizers.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace semitone::amp::changed_weights_test {
namespace {

using test::expect_bitwise_equal;
using test::message_of;
using testing::AllOf;
using testing::HasSubstr;

Options o2(c10::ScalarType dtype = torch::kBFloat16) {
  return Options(OptLevel::O2).dtype(dtype).loss_scale(1.0).verbosity(0);
}

at::Tensor ones_of(const torch::nn::Linear& net) {
  return torch::ones({1, net->options.in_features()});
}

// A layer whose weights and gradients are all 1.
torch::nn::Linear layer_of_ones() {
  torch::nn::Linear net(torch::nn::LinearOptions(4, 1).bias(false));
  const torch::NoGradGuard no_grad;
  net->weight.fill_(1.0);
  return net;
}

using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

const std::vector<std::pair<const char*, Make>>& optimizers() {
  static const std::vector<std::pair<const char*, Make>> all{
      {"SGD",
       [](const auto& parameters) {
         return std::make_unique<torch::optim::SGD>(parameters, 1e-3);
       }},
      {"FusedSGD",
       [](const auto& parameters) {
         return std::make_unique<optim::FusedSGD>(parameters, optim::FusedSGDOptions(1e-3));
       }},
      {"FusedSGD, split",
       [](const auto& parameters) {
         return std::make_unique<optim::FusedSGD>(parameters,
                                                  optim::FusedSGDOptions(1e-3).split_master(true));
       }},
  };
  return all;
}

at::Tensor exact_weight(MixedPrecision& mixed, const torch::nn::Linear& net) {
  const auto fp32 = mixed.fp32_weights(net);
  return net->weight.detach().clone();
}

void train(MixedPrecision& mixed, const torch::nn::Linear& net,
           torch::optim::Optimizer& optimizer) {
  optimizer.zero_grad();
  auto model = net;
  mixed.scale_loss(mixed.forward(model, ones_of(net)).sum(), optimizer).backward();
  EXPECT_EQ(mixed.step(optimizer), Step::stepped);
}

// An update of 0.001 is below half a unit of bf16 at 1: without the masters' lower bits nothing
// moves.
TEST(WeightsWrittenTo, KeepWhatTheMasterHasBelowAUnit) {
  const std::vector<std::pair<const char*, std::function<void(at::Tensor&)>>> touches{
      {"none", [](at::Tensor&) {}},
      {"clamp_", [](at::Tensor& weight) { weight.clamp_(-5, 5); }},
      {"mul_ by a mask of ones", [](at::Tensor& weight) { weight.mul_(torch::ones_like(weight)); }},
      {"away and back",
       [](at::Tensor& weight) {
         const at::Tensor copy = weight.clone();
         weight.zero_();
         weight.copy_(copy);
       }},
      {"other memory with the same values",
       [](at::Tensor& weight) { weight.set_data(weight.clone()); }},
  };
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    for (const auto& [name, make] : optimizers()) {
      for (const auto& [what, touch] : touches) {
        SCOPED_TRACE(std::string(name) + ", " + what);
        auto net = layer_of_ones();
        const auto optimizer = make(net->parameters());
        auto mixed = initialize(net, *optimizer, o2(dtype));
        for (int step = 0; step < 100; ++step) {
          train(mixed, net, *optimizer);
          const torch::NoGradGuard no_grad;
          touch(net->weight);
        }
        EXPECT_NEAR(exact_weight(mixed, net)[0][0].item<double>(), 0.9, 1e-5);
      }
    }
  }
}

// As programs evaluate averaged weights: each forward with them takes them over.
TEST(WeightsWrittenTo, AreExactAgainAfterAnEvaluationWithOtherWeights) {
  const std::vector<std::pair<const char*, std::function<void(at::Tensor&, const at::Tensor&)>>>
      swaps{{"copy_", [](at::Tensor& weight, const at::Tensor& value) { weight.copy_(value); }},
            {"set_data",
             [](at::Tensor& weight, const at::Tensor& value) { weight.set_data(value.clone()); }}};
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    for (const auto& [name, make] : optimizers()) {
      for (const auto& [how, swap] : swaps) {
        for (const int changed : {1, 4}) {
          SCOPED_TRACE(std::string(name) + ", " + how + ", " + std::to_string(changed));
          auto net = layer_of_ones();
          const auto optimizer = make(net->parameters());
          auto mixed = initialize(net, *optimizer, o2(dtype));
          for (int step = 0; step < 100; ++step) {
            train(mixed, net, *optimizer);
            const torch::NoGradGuard no_grad;
            const at::Tensor own = net->weight.detach().clone();
            at::Tensor other = own.clone();
            other.narrow(1, 0, changed).fill_(0.5);
            for (int evaluation = 0; evaluation < 2; ++evaluation) {
              swap(net->weight, other);
              EXPECT_EQ(mixed.forward(net, ones_of(net)).item<float>(), other.sum().item<float>());
              swap(net->weight, own);
            }
            mixed.forward(net, ones_of(net));
          }
          const at::Tensor exact = exact_weight(mixed, net)[0];
          EXPECT_NEAR(exact[0].item<double>(), 0.9, 1e-5);
          EXPECT_NEAR(exact[3].item<double>(), 0.9, 1e-5);
        }
      }
    }
  }
}

// Pruned for good, after weights were swapped and back.
TEST(WeightsWrittenTo, StayAsTheyWereWrittenAfterASwap) {
  auto net = layer_of_ones();
  torch::optim::SGD optimizer(net->parameters(), 1e-3);
  auto mixed = initialize(net, optimizer, o2());
  for (int step = 0; step < 10; ++step) train(mixed, net, optimizer);
  const auto write = [&](const at::Tensor& value) {
    const torch::NoGradGuard no_grad;
    net->weight.copy_(value);
    mixed.forward(net, ones_of(net));
  };
  const at::Tensor own = net->weight.detach().clone();
  at::Tensor pruned = own.clone();
  pruned[0][0] = 0;
  write(pruned);
  write(torch::full_like(own, 0.25));
  write(pruned);
  const at::Tensor exact = exact_weight(mixed, net)[0];
  EXPECT_EQ(exact[0].item<double>(), 0);
  for (int i = 1; i < 4; ++i) EXPECT_NEAR(exact[i].item<double>(), 0.99, 1e-6);
}

// Only the changed elements: one is pruned, one clamped, one is NaN.
TEST(WeightsWrittenTo, GiveTheirMastersTheElementsThatChanged) {
  auto net = layer_of_ones();
  torch::optim::SGD optimizer(net->parameters(), 1e-3);
  auto mixed = initialize(net, optimizer, o2());
  for (int step = 0; step < 10; ++step) train(mixed, net, optimizer);
  {
    const torch::NoGradGuard no_grad;
    net->weight[0][0] = 0.0;
    net->weight[0][1] = 0.5;
    net->weight[0][2] = std::numeric_limits<double>::quiet_NaN();
  }
  const at::Tensor exact = exact_weight(mixed, net)[0];
  EXPECT_EQ(exact[0].item<double>(), 0.0);
  EXPECT_EQ(exact[1].item<double>(), 0.5);
  EXPECT_TRUE(std::isnan(exact[2].item<double>()));
  EXPECT_NEAR(exact[3].item<double>(), 0.99, 1e-6);
  EXPECT_TRUE(std::isnan(mixed.master_params(optimizer)[0][0][2].item<double>()));
}

// A negative lower half must not turn a weight that was set to zero into a NaN.
TEST(WeightsWrittenTo, MayBeZeroWithSplitMasters) {
  auto net = layer_of_ones();
  optim::FusedSGD optimizer(net->parameters(), optim::FusedSGDOptions(1e-3).split_master(true));
  auto mixed = initialize(net, optimizer, o2());
  for (int step = 0; step < 10; ++step) {
    train(mixed, net, optimizer);
    const torch::NoGradGuard no_grad;
    net->weight[0][0] = 0.0;
  }
  EXPECT_EQ(net->weight[0][0].item<double>(), 0.0);
  EXPECT_NEAR(exact_weight(mixed, net)[0][3].item<double>(), 0.99, 1e-6);
}

// Nothing would keep what updates add below 16 bits.
TEST(ModelsThatAreCastLater, AreErrors) {
  for (const std::string level : {"O0", "O1", "O2", "O3"}) {
    for (const auto dtype : {torch::kHalf, torch::kDouble}) {
      SCOPED_TRACE(level + ", " + c10::toString(dtype));
      torch::nn::BatchNorm1d norm(4);
      torch::nn::Sequential net(torch::nn::Linear(4, 4), norm);
      torch::optim::SGD optimizer(net->parameters(), 1e-3);
      auto mixed = initialize(net, optimizer, Options(level).dtype(torch::kBFloat16).verbosity(0));
      const at::Tensor x = torch::ones({2, 4});
      mixed.forward(net, x);
      const auto before = net->parameters().front().scalar_type();
      net->to(dtype);
      EXPECT_THAT(message_of<Error>([&] { mixed.forward(net, x); }),
                  AllOf(HasSubstr("as initialize left it"), HasSubstr("weight")));
      EXPECT_THAT(message_of<Error>([&] { mixed.call([&](const at::Tensor& t) { return t; }, x); }),
                  HasSubstr("as initialize left it"));
      net->to(before);
      if (level == "O2") norm->to(torch::kFloat);
      mixed.forward(net, x);
    }
  }
}

TEST(ModelsThatAreCastLater, MayBeFp32Again) {
  auto net = layer_of_ones();
  torch::optim::SGD optimizer(net->parameters(), 1e-3);
  auto mixed = initialize(net, optimizer, o2());
  for (int step = 0; step < 50; ++step) train(mixed, net, optimizer);
  net->to(torch::kFloat);
  for (int step = 0; step < 50; ++step) train(mixed, net, optimizer);
  EXPECT_NEAR(net->weight[0][0].item<double>(), 0.9, 2e-3);
}

TEST(WeightsWrittenTo, OfAnotherShapeAreErrors) {
  torch::nn::Linear net(torch::nn::LinearOptions(4, 1).bias(false));
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  auto mixed = initialize(net, optimizer, o2());
  net->weight.set_data(torch::ones({1, 2}, torch::kBFloat16));
  EXPECT_THAT(message_of<Error>([&] { mixed.master_params(optimizer); }),
              AllOf(HasSubstr("[1, 4]"), HasSubstr("got [1, 2]")));
}

// Two layers, the first of them frozen at the beginning.
struct Unfreezing {
  explicit Unfreezing(bool fused) {
    torch::manual_seed(1);
    net = test::odd_net();
    for (auto& parameter : net->first->parameters()) parameter.requires_grad_(false);
    if (fused) {
      optimizer =
          std::make_unique<optim::FusedAdam>(net->parameters(), optim::FusedAdamOptions(1e-2));
    } else {
      optimizer = std::make_unique<torch::optim::Adam>(net->parameters(), 1e-2);
    }
    mixed.emplace(initialize(net, *optimizer, o2()));
  }

  void step(std::uint64_t number) {
    torch::manual_seed(100 + number);
    optimizer->zero_grad();
    mixed->scale_loss(mixed->forward(net, torch::randn({8, 9})).square().sum(), *optimizer)
        .backward();
    EXPECT_EQ(mixed->step(*optimizer), Step::stepped);
  }

  std::vector<at::Tensor> exact() {
    const auto fp32 = mixed->fp32_weights(net);
    return test::copies(net->parameters());
  }

  test::ToyNet net{nullptr};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::optional<MixedPrecision> mixed;
};

// Evaluation in inference mode is like evaluation without gradients, even if it is the first
// forward with a parameter that must get a master.
TEST(InferenceMode, LeavesTrainingAsItIs) {
  for (const bool fused : {false, true}) {
    std::vector<std::vector<at::Tensor>> results;
    for (const bool inference : {false, true}) {
      Unfreezing run(fused);
      run.step(0);
      for (auto& parameter : run.net->first->parameters()) parameter.requires_grad_(true);
      for (std::uint64_t epoch = 1; epoch < 4; ++epoch) {
        {
          std::optional<c10::InferenceMode> mode;
          if (inference) mode.emplace();
          const torch::NoGradGuard no_grad;
          run.net->eval();
          run.mixed->forward(run.net, torch::ones({2, 9}));
          const auto region = run.mixed->autocast();
          run.mixed->call([&](const at::Tensor& x) { return run.net->first(x); },
                          torch::ones({2, 9}));
          run.exact();
          torch::serialize::OutputArchive archive;
          run.mixed->save(archive);
          run.net->train();
        }
        for (const at::Tensor& parameter : run.net->parameters())
          EXPECT_FALSE(parameter.is_inference());
        for (const at::Tensor& master : run.mixed->master_params(*run.optimizer))
          EXPECT_FALSE(master.is_inference());
        run.step(epoch);
      }
      results.push_back(run.exact());
    }
    for (std::size_t i = 0; i < results[0].size(); ++i)
      expect_bitwise_equal(results[1][i], results[0][i]);
    // It trains.
    const Unfreezing before(fused);
    EXPECT_FALSE(
        torch::equal(results[0][0].to(torch::kBFloat16), before.net->first->weight.detach()));
  }
}

TEST(InferenceMode, MayLoadAndInitialize) {
  const test::TemporaryFolder folder;
  const std::string path = folder / "model.pt";
  Unfreezing run(/*fused=*/false);
  run.step(0);
  {
    const c10::InferenceMode mode;
    run.mixed->save_model(run.net, path);
    run.mixed->load_model(run.net, path);
  }
  run.step(1);

  auto net = layer_of_ones();
  torch::optim::SGD optimizer(net->parameters(), 1e-3);
  std::optional<MixedPrecision> mixed;
  {
    const c10::InferenceMode mode;
    mixed.emplace(initialize(net, optimizer, o2()));
    mixed->forward(net, ones_of(net));
  }
  EXPECT_FALSE(net->weight.is_inference());
  for (int step = 0; step < 10; ++step) train(*mixed, net, optimizer);
  EXPECT_NEAR(exact_weight(*mixed, net)[0][0].item<double>(), 0.99, 1e-6);
}

TEST(InferenceMode, MayHaveMadeTheModel) {
  const c10::InferenceMode mode;
  const test::TemporaryFolder folder;
  const std::string path = folder / "model.pt";
  auto net = layer_of_ones();
  auto mixed = initialize(net, o2());
  EXPECT_EQ(mixed.forward(net, ones_of(net)).item<double>(), 4.0);
  mixed.save_model(net, path);
  net->weight.zero_();
  mixed.load_model(net, path);
  EXPECT_EQ(mixed.forward(net, ones_of(net)).item<double>(), 4.0);
}

class LoadedByTorch : public testing::Test {
 protected:
  LoadedByTorch() {
    torch::manual_seed(3);
    stock_ = test::odd_net();
    torch::save(stock_, path_);
    torch::manual_seed(4);
  }

  void expect_loaded(const test::ToyNet& net) const {
    const auto want = stock_->parameters();
    const auto got = net->parameters();
    for (std::size_t i = 0; i < want.size(); ++i)
      expect_bitwise_equal(got[i].detach(), want[i].detach().to(got[i].scalar_type()));
  }

  test::TemporaryFolder folder_;
  std::string path_ = folder_ / "model.pt";
  test::ToyNet stock_{nullptr};
};

// LibTorch leaves the bytes of fp32 numbers in 16-bit tensors.
TEST_F(LoadedByTorch, AFileInFp32IsTakenOver) {
  for (const char* level : {"O2", "O3"}) {
    for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
      for (const auto& [name, make] : optimizers()) {
        SCOPED_TRACE(std::string(level) + ", " + name);
        // Split masters are for bf16.
        const bool no_masters = std::string(level) == "O3" && dtype == torch::kHalf;
        if (no_masters && std::string(name) == "FusedSGD, split") continue;
        test::ToyNet net = test::odd_net();
        net->second->weight.requires_grad_(false);  // a weight without a master
        const auto optimizer = make(net->parameters());
        auto mixed =
            initialize(net, *optimizer, Options(level).dtype(dtype).loss_scale(1.0).verbosity(0));
        for (int round = 0; round < 2; ++round) {
          torch::load(net, path_);
          const auto result = mixed.forward(net, torch::ones({3, 9}));
          EXPECT_TRUE(result.isfinite().all().item<bool>());
          expect_loaded(net);
          for (const at::Tensor& parameter : net->parameters())
            EXPECT_EQ(parameter.storage().nbytes(), parameter.nbytes());
          // Trained weights, for the next load.
          optimizer->zero_grad();
          mixed.scale_loss(result.sum(), *optimizer).backward();
          mixed.step(*optimizer);
        }
      }
    }
  }
}

// There the model would compute with these bytes before any call of MixedPrecision.
TEST_F(LoadedByTorch, AFileInAnotherDtypeIsRefusedInsideARegion) {
  for (const char* level : {"O2", "O3"}) {
    SCOPED_TRACE(level);
    test::ToyNet net = test::odd_net();
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    auto mixed = initialize(net, optimizer, Options(level).dtype(torch::kBFloat16).verbosity(0));
    const auto before = test::copies(net->parameters());
    const auto region = mixed.autocast();
    test::expect_error([&] { torch::load(net, path_); },
                       {"[autocast] expected values in bfloat16 for set_() inside a region, which "
                        "torch::load calls, got float32 — load before the region begins"});
    expect_bitwise_equal(test::copies(net->parameters()), before);
    mixed.load_model(net, path_);
    expect_loaded(net);
    const std::string in_bf16 = folder_ / "bf16.pt";
    torch::save(net, in_bf16);
    torch::load(net, in_bf16);
    expect_loaded(net);
  }
}

TEST_F(LoadedByTorch, MastersAreWhatTheFileHolds) {
  for (const auto& [name, make] : optimizers()) {
    SCOPED_TRACE(name);
    test::ToyNet net = test::odd_net();
    const auto optimizer = make(net->parameters());
    auto mixed = initialize(net, *optimizer, o2());
    torch::load(net, path_);
    const auto fp32 = mixed.fp32_weights(net);
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      expect_bitwise_equal(net->parameters()[i].detach(), stock_->parameters()[i].detach());
  }
}

TEST_F(LoadedByTorch, MemoryThatAnotherTensorHoldsIsAnErrorWithARemedy) {
  test::ToyNet net = test::odd_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  auto mixed = initialize(net, optimizer, o2());
  torch::serialize::InputArchive archive;  // holds what it has read
  archive.load_from(path_);
  net->load(archive);
  EXPECT_THAT(message_of<Error>([&] { mixed.forward(net, torch::ones({3, 9})); }),
              AllOf(HasSubstr("'first.weight'"), HasSubstr("mixed.load_model")));
}

struct GrowingImpl : torch::nn::Module {
  GrowingImpl() { register_module("first", first); }
  void grow() {
    second = register_module("second", torch::nn::Linear(9, 2));
    second->to(torch::kBFloat16);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = first->forward(x);
    return second.is_empty() ? y : second->forward(y);
  }
  torch::nn::Linear first{9, 9};
  torch::nn::Linear second{nullptr};
};
TORCH_MODULE(Growing);

// A layer that is added after initialize has a master like the others.
TEST(LayersThatAreAdded, AreSavedAveragedAndLoadedExactly) {
  for (const auto& [name, make] : optimizers()) {
    SCOPED_TRACE(name);
    torch::manual_seed(1);
    Growing net;
    const auto optimizer = make(net->parameters());
    auto mixed = initialize(net, *optimizer, o2());
    const auto train = [&] {
      for (int step = 0; step < 3; ++step) {
        optimizer->zero_grad();
        mixed.scale_loss(mixed.forward(net, torch::ones({2, 9})).square().sum(), *optimizer)
            .backward();
        mixed.step(*optimizer);
      }
    };
    train();
    net->grow();
    optimizer->add_param_group(torch::optim::OptimizerParamGroup(net->second->parameters()));
    train();
    std::vector<at::Tensor> exact;
    {
      const auto fp32 = mixed.fp32_weights(net);
      exact = test::copies(net->parameters());
    }
    // Its master has bits that 16 do not hold.
    EXPECT_FALSE(torch::equal(exact[2], exact[2].to(torch::kBFloat16).to(torch::kFloat)));
    expect_bitwise_equal(weights::state_dict(net)["second.weight"], exact[2]);

    optim::ExponentialMovingAverage average(*net, 0.5);
    average.update();
    {
      const auto scope = average.apply();
      const auto fp32 = mixed.fp32_weights(net);
      expect_bitwise_equal(net->parameters()[2].detach(), exact[2]);
    }
    const test::TemporaryFolder folder;
    const std::string path = folder / "model.pt";
    mixed.save_model(net, path);
    train();
    torch::load(net, path);
    const auto fp32 = mixed.fp32_weights(net);
    for (std::size_t i = 0; i < exact.size(); ++i)
      expect_bitwise_equal(net->parameters()[i].detach(), exact[i]);
  }
}

// A program's own views of larger 16-bit memory do not count.
TEST_F(LoadedByTorch, ViewsOf16BitMemoryStayAsTheyAre) {
  test::ToyNet net = test::odd_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  auto mixed = initialize(net, optimizer, o2());
  const at::Tensor values = net->first->weight.detach().clone();
  const at::Tensor flat = torch::zeros({3 * values.numel()}, torch::kBFloat16);
  const at::Tensor view = flat.narrow(0, values.numel(), values.numel()).view(values.sizes());
  view.copy_(values);
  net->first->weight.set_data(view);
  mixed.forward(net, torch::ones({3, 9}));
  EXPECT_EQ(net->first->weight.const_data_ptr(), view.const_data_ptr());
  expect_bitwise_equal(net->first->weight.detach(), values);
}

// One buffer of all parameters, of which the first begins where the buffer does.
TEST_F(LoadedByTorch, ViewsThatVectorToParametersLeavesStayAsTheyAre) {
  for (const int layers : {2, 4}) {
    SCOPED_TRACE(layers);
    torch::nn::Sequential net;
    for (int i = 0; i < layers; ++i)
      net->push_back(torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false)));
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    auto mixed = initialize(net, optimizer, o2());
    const auto parameters = net->parameters();
    std::vector<at::Tensor> halves;
    {
      const at::NoGradGuard no_grad;
      for (const at::Tensor& parameter : parameters) halves.push_back(parameter * 0.5);
      torch::nn::utils::vector_to_parameters(
          torch::nn::utils::parameters_to_vector(parameters) * 0.5, parameters);
    }
    mixed.forward(net, torch::ones({3, 4}));
    for (std::size_t i = 0; i < parameters.size(); ++i)
      expect_bitwise_equal(parameters[i].detach(), halves[i]);
  }
}

// After the MixedPrecision is destroyed the optimizer trains the model, not masters that nothing
// reads.
TEST(MixedPrecisionThatIsGone, GivesOptimizersTheirParametersBack) {
  const std::vector<std::pair<const char*, Make>> with_state{
      {"Adam",
       [](const auto& parameters) {
         return std::make_unique<torch::optim::Adam>(parameters, 0.1);
       }},
      {"SGD with momentum",
       [](const auto& parameters) {
         return std::make_unique<torch::optim::SGD>(parameters,
                                                    torch::optim::SGDOptions(0.1).momentum(0.9));
       }},
      {"FusedAdam",
       [](const auto& parameters) {
         return std::make_unique<optim::FusedAdam>(parameters, optim::FusedAdamOptions(0.1));
       }},
  };
  for (const auto& [name, make] : with_state) {
    SCOPED_TRACE(name);
    auto net = layer_of_ones();
    const auto optimizer = make(net->parameters());
    const void* state = nullptr;
    {
      auto mixed = initialize(net, *optimizer, o2());
      train(mixed, net, *optimizer);
      const auto moved = std::move(mixed);
      const auto& master = optimizer->param_groups()[0].params()[0];
      EXPECT_FALSE(master.is_same(net->weight));
      state = optimizer->state().at(master.unsafeGetTensorImpl()).get();
    }
    ASSERT_TRUE(optimizer->param_groups()[0].params()[0].is_same(net->weight));
    ASSERT_EQ(optimizer->state().size(), 1U);
    EXPECT_EQ(optimizer->state().at(net->weight.unsafeGetTensorImpl()).get(), state);
    const at::Tensor before = net->weight.detach().clone();
    optimizer->zero_grad();
    net->forward(ones_of(net).to(torch::kBFloat16)).sum().backward();
    optimizer->step();
    EXPECT_TRUE(net->weight.detach().lt(before).all().item<bool>());
  }
}

TEST(Initialize, TakesOptimizersWhoseStateCannotBeSaved) {
  auto net = layer_of_ones();
  test::OwnOptimizer optimizer(net->parameters());
  net->forward(ones_of(net)).sum().backward();
  optimizer.step();
  optimizer.zero_grad();
  auto mixed = initialize(net, optimizer, o2());
  train(mixed, net, optimizer);
  EXPECT_NEAR(exact_weight(mixed, net)[0][0].item<double>(), 1 - 0.01 - 0.015, 1e-6);
}

// A 16-bit parameter of the optimizer that is in no model has 16-bit state that cannot be widened.
TEST(Initialize, PutsEverythingBackWhereItFails) {
  torch::manual_seed(1);
  test::ToyNet net = test::odd_net();
  auto fine = layer_of_ones();
  optim::FusedAdam split(fine->parameters(), optim::FusedAdamOptions(1e-3).split_master(true));
  torch::optim::Adam adam(net->first->parameters(), 1e-3);
  const at::Tensor unlisted = torch::ones({3}, torch::kBFloat16).requires_grad_(true);
  std::vector<at::Tensor> own = net->second->parameters();
  own.push_back(unlisted);
  test::OwnOptimizer unsaved(own);

  net->forward(torch::randn({4, 9})).square().sum().backward();
  unlisted.mutable_grad() = torch::ones_like(unlisted);
  adam.step();
  unsaved.step();
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : net->parameters()) {
    values.push_back(parameter.detach().clone());
    gradients.push_back(parameter.grad().clone());
  }
  EXPECT_THAT(message_of<Error>([&] {
                const auto mixed = initialize({net, fine}, {split, adam, unsaved}, o2());
              }),
              AllOf(HasSubstr("amp.master_weights"), HasSubstr("serialize()")));

  const auto parameters = net->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    expect_bitwise_equal(parameters[i].detach(), values[i]);
    expect_bitwise_equal(parameters[i].grad(), gradients[i]);
  }
  EXPECT_EQ(fine->weight.scalar_type(), torch::kFloat);
  EXPECT_TRUE(split.state().empty());
  EXPECT_TRUE(adam.param_groups()[0].params()[0].is_same(net->first->weight));
  EXPECT_EQ(adam.state().count(net->first->weight.unsafeGetTensorImpl()), 1U);
  EXPECT_TRUE(unsaved.param_groups()[0].params()[0].is_same(net->second->weight));
  EXPECT_EQ(unsaved.state().count(unlisted.unsafeGetTensorImpl()), 1U);

  // Another attempt can therefore be made.
  torch::optim::Adam again(net->second->parameters(), 1e-3);
  auto mixed = initialize({net, fine}, {split, adam, again}, o2());
  mixed.scale_loss(mixed.forward(net, torch::ones({4, 9})).square().sum(), {adam, again})
      .backward();
  EXPECT_EQ(mixed.step(adam), Step::stepped);
}

}  // namespace
}  // namespace semitone::amp::changed_weights_test
