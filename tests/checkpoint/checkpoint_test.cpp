// What a checkpoint restores.

#include "semitone/checkpoint.h"

#include "semitone/amp/divergence_guard.h"
#include "semitone/core/error.h"
#include "semitone/optim.h"
#include "semitone/scaling/grad_scaler.h"
#include "tests/checkpoint/training.h"
#include "tests/support/captured_log.h"
#include "tests/support/errors.h"
#include "tests/support/levels.h"
#include "tests/support/optimizers.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace semitone::checkpoint::test {
namespace {

using semitone::test::CapturedLog;
using semitone::test::TemporaryFolder;
using ::testing::HasSubstr;

std::vector<Setting> all_settings() {
  std::vector<Setting> settings;
  for (const char* level : semitone::test::kLevels) {
    for (const auto dtype : semitone::test::kDtypes) {
      for (const char* optimizer : kOptimizers) {
        // The optimizer has no fp16 masters to split.
        const bool is_split = std::string(optimizer) == "split FusedAdam";
        if (is_split && std::string(level) == "O3" && dtype == torch::kHalf) continue;
        settings.push_back({.level = level, .dtype = dtype, .optimizer = optimizer});
      }
    }
  }
  return settings;
}

// The tensors of an optimizer's state, without those in lists.
std::vector<at::Tensor> tensors_in(const torch::optim::OptimizerParamState& state) {
  torch::serialize::OutputArchive saved;
  state.serialize(saved);
  std::stringstream stream;
  saved.save_to(stream);
  torch::serialize::InputArchive loaded;
  loaded.load_from(stream);
  std::vector<at::Tensor> tensors;
  for (const std::string& key : loaded.keys()) {
    c10::IValue value;
    loaded.read(key, value);
    if (value.isTensor()) tensors.push_back(value.toTensor());
  }
  return tensors;
}

class ResumedTraining : public testing::TestWithParam<Setting> {};

TEST_P(ResumedTraining, ContinuesBitForBit) {
  const TemporaryFolder folder;
  Training whole(GetParam());
  whole.train_to(12);

  Training half(GetParam());
  half.train_to(5);
  auto saved = half.checkpoint(folder / "run");
  saved.save(5);
  const auto before = half.state();
  half.train_to(6);  // saving has changed nothing

  Setting other = GetParam();
  other.seed = 2;
  Training resumed(other);
  auto checkpoint = resumed.checkpoint(folder / "run");
  EXPECT_EQ(checkpoint.resume(), 5);
  resumed.step = 5;
  EXPECT_TRUE(same_bits(resumed.state(), before));
  resumed.train_to(12);
  EXPECT_TRUE(same_bits(resumed.state(), whole.state()));
  EXPECT_GT(resumed.mixed.skipped_steps(), 0);
}

TEST_P(ResumedTraining, IsNotDisturbedBySaving) {
  const TemporaryFolder folder;
  Training whole(GetParam());
  whole.train_to(8);
  Training saving(GetParam());
  auto checkpoint = saving.checkpoint(folder / "run");
  for (std::int64_t step = 1; step <= 8; ++step) {
    saving.train_to(step);
    checkpoint.save(step);
  }
  EXPECT_TRUE(same_bits(saving.state(), whole.state()));
}

TEST_P(ResumedTraining, RestoresWhatWasTrainedBeyondTheCheckpoint) {
  const TemporaryFolder folder;
  Training run(GetParam());
  auto checkpoint = run.checkpoint(folder / "run");
  run.train_to(4);
  checkpoint.save(4);
  run.train_to(9);
  const auto first = run.state();
  EXPECT_EQ(checkpoint.resume(), 4);
  run.step = 4;
  run.train_to(9);
  EXPECT_TRUE(same_bits(run.state(), first));
}

INSTANTIATE_TEST_SUITE_P(Checkpoint, ResumedTraining, testing::ValuesIn(all_settings()));

TEST(Checkpoint, OfOneLevelHasTheExactWeightsForAnyOther) {
  int number = 0;
  for (const char* const from : semitone::test::kLevels) {
    for (const char* const to : semitone::test::kLevels) {
      for (const char* const optimizer : kOptimizers) {
        if (std::string(from) == to) continue;
        SCOPED_TRACE(std::string(from) + " to " + to + ", " + optimizer);
        const TemporaryFolder folder;
        // Not AdamW, whose eps is 0 in fp16 at O3, nor split masters, which are for bf16 only.
        const bool can_be_half =
            std::string(optimizer) == "SGD" || std::string(optimizer) == "FusedAdam";
        const auto dtype = can_be_half && number++ % 3 == 0 ? torch::kHalf : torch::kBFloat16;
        Training saved({.level = from, .dtype = dtype, .optimizer = optimizer});
        saved.train_to(3);
        saved.checkpoint(folder / "run").save(3);
        Training loaded({.level = to, .dtype = dtype, .optimizer = optimizer, .seed = 2});
        const CapturedLog log;
        EXPECT_EQ(loaded.checkpoint(folder / "run").resume(), 3);
        EXPECT_THAT(log.text(), HasSubstr("loss scales start anew"));
        EXPECT_EQ(loaded.loss_sum, saved.loss_sum);
        const bool is_fused = std::string(optimizer).find("Fused") != std::string::npos;
        for (const auto& [parameter, state] : loaded.optimizer->state()) {
          if (is_fused || std::string(to) == "O3") break;
          for (const at::Tensor& tensor : tensors_in(*state))
            EXPECT_EQ(tensor.scalar_type(), torch::kFloat);
        }
        std::vector<at::Tensor> want;
        {
          const auto fp32 = saved.mixed.fp32_weights(saved.net);
          want = semitone::test::copies(saved.net->parameters());
        }
        if (std::string(to) == "O3") {
          for (at::Tensor& tensor : want) tensor = tensor.to(dtype).to(torch::kFloat);
        }
        {
          const auto fp32 = loaded.mixed.fp32_weights(loaded.net);
          EXPECT_TRUE(same_bits(semitone::test::copies(loaded.net->parameters()), want));
        }
        loaded.step = 3;
        loaded.train_to(5);
      }
    }
  }
}

// @param options  of the optimizer
template <typename Optimizer, typename Options>
void expect_fp32_state(const Options& options) {
  const TemporaryFolder folder;
  const auto step = [](const at::Tensor& weight, torch::optim::Optimizer& optimizer) {
    optimizer.step([&] {
      optimizer.zero_grad();
      at::Tensor loss = (weight - 3).square().sum();
      loss.backward();
      return loss;
    });
  };
  const at::Tensor low = torch::ones({3}, torch::kBFloat16).requires_grad_();
  Optimizer saved(std::vector<at::Tensor>{low}, options);
  step(low, saved);
  Checkpoint(folder / "run").add("optimizer", saved).save(1);
  const at::Tensor wide = torch::ones({3}).requires_grad_();
  Optimizer loaded(std::vector<at::Tensor>{wide}, options);
  Checkpoint(folder / "run").add("optimizer", loaded).resume();
  ASSERT_EQ(saved.state().size(), 1);
  ASSERT_EQ(loaded.state().size(), 1);
  auto want = tensors_in(*saved.state().begin()->second);
  EXPECT_FALSE(want.empty());
  for (at::Tensor& tensor : want) tensor = tensor.to(torch::kFloat);
  EXPECT_TRUE(same_bits(tensors_in(*loaded.state().begin()->second), want));
  step(wide, loaded);
}

// The state of a run at O3. LibTorch's optimizers average in its dtype, or refuse a mixture.
TEST(Checkpoint, Of16BitParametersGivesFp32ParametersTheirStateInFp32) {
  expect_fp32_state<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9));
  expect_fp32_state<torch::optim::Adam>(torch::optim::AdamOptions(0.1).amsgrad(true));
  expect_fp32_state<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1));
  expect_fp32_state<torch::optim::RMSprop>(
      torch::optim::RMSpropOptions(0.1).momentum(0.9).centered(true));
  expect_fp32_state<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1));
  // So many iterations that all of its history is defined.
  expect_fp32_state<torch::optim::LBFGS>(
      torch::optim::LBFGSOptions(0.1).max_iter(4).history_size(2));
}

TEST(Checkpoint, RestoresValuesOfEveryType) {
  const TemporaryFolder folder;
  struct Values {
    bool flag = false;
    int small = 0;
    std::int64_t large = 0;
    std::uint64_t seed = 0;
    float ratio = 0;
    double nan = 0;
    double infinity = 0;
    std::string text;
    at::Tensor half = torch::zeros({2, 3}, torch::kHalf);
    at::Tensor none;
    void add_to(Checkpoint& checkpoint) {
      checkpoint.add("flag", flag).add("small", small).add("large", large).add("seed", seed);
      checkpoint.add("ratio", ratio).add("nan", nan).add("infinity", infinity);
      checkpoint.add("text", text).add("half", half).add("none", none);
    }
  };
  Values saved{true,
               -3,
               std::numeric_limits<std::int64_t>::min(),
               std::numeric_limits<std::uint64_t>::max(),
               0.1F,
               std::nan(""),
               -std::numeric_limits<double>::infinity(),
               std::string("two\nlines, and \0 too", 20),
               torch::full({2, 3}, 0.3, torch::kHalf),
               torch::arange(3)};
  Checkpoint writer(folder / "run");
  saved.add_to(writer);
  writer.save(0);
  Values loaded;
  const at::Tensor same = loaded.half;
  Checkpoint reader(folder / "run");
  loaded.add_to(reader);
  EXPECT_EQ(reader.resume(), 0);
  EXPECT_TRUE(loaded.flag);
  EXPECT_EQ(loaded.small, -3);
  EXPECT_EQ(loaded.large, saved.large);
  EXPECT_EQ(loaded.seed, saved.seed);
  EXPECT_EQ(loaded.ratio, 0.1F);
  EXPECT_TRUE(std::isnan(loaded.nan));
  EXPECT_EQ(loaded.infinity, saved.infinity);
  EXPECT_EQ(loaded.text, saved.text);
  EXPECT_TRUE(same_bits(same, saved.half));
  EXPECT_TRUE(same_bits(loaded.none, saved.none));
}

TEST(Checkpoint, RestoresGeneratorsAndOtherSavableObjects) {
  const TemporaryFolder folder;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  amp::GradScaler scaler;
  scaler.scale(torch::ones({}));
  scaler.update(16.0);
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("generator", generator).add("scaler", scaler);
  checkpoint.save(1);
  const auto own = torch::randn({4}, generator);
  const auto default_one = torch::randn({4});
  scaler.update(2.0);
  EXPECT_EQ(checkpoint.resume(), 1);
  EXPECT_TRUE(same_bits(torch::randn({4}, generator), own));
  EXPECT_TRUE(same_bits(torch::randn({4}), default_one));
  EXPECT_EQ(scaler.get_scale(), 16.0);
}

TEST(Checkpoint, WithoutDefaultGeneratorsLeavesThem) {
  const TemporaryFolder folder;
  std::int64_t value = 1;
  Checkpoint checkpoint(folder / "run", CheckpointOptions().default_generators(false));
  checkpoint.add("value", value);
  torch::manual_seed(1);
  checkpoint.save(1);
  torch::manual_seed(2);
  const auto want = torch::randn({4});
  torch::manual_seed(2);
  checkpoint.resume();
  EXPECT_TRUE(same_bits(torch::randn({4}), want));
}

TEST(Checkpoint, RestoresATorchScriptModule) {
  const TemporaryFolder folder;
  torch::jit::Module script("Scaled");
  script.register_parameter("weight", torch::full({3}, 0.5), /*is_buffer=*/false);
  script.register_buffer("count", torch::ones({1}, torch::kLong));
  script.define("def forward(self, x):\n  return x * self.weight\n");
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("script", script);
  checkpoint.save(1);
  const at::Tensor weight = script.attr("weight").toTensor();
  {
    const torch::NoGradGuard no_grad;
    weight.fill_(7);
    script.attr("count").toTensor().fill_(9);
  }
  EXPECT_EQ(checkpoint.resume(), 1);
  EXPECT_TRUE(same_bits(weight.detach(), torch::full({3}, 0.5)));
  EXPECT_EQ(script.attr("count").toTensor().item<std::int64_t>(), 1);
}

TEST(Checkpoint, LoadsIntoTheMemoryOfTheModel) {
  const TemporaryFolder folder;
  semitone::test::ToyConvNet net;
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("net", net);
  checkpoint.save(1);
  const at::Tensor view = net->conv->weight.detach().view(-1);
  const at::Tensor want = view.clone();
  view.fill_(0);
  checkpoint.resume();
  EXPECT_TRUE(same_bits(view, want));
  EXPECT_TRUE(net->conv->weight.requires_grad());
}

template <typename Optimizer>
class CheckpointOfTiedWeights : public ::testing::Test {};
using OptimizersWithState =
    ::testing::Types<torch::optim::AdamW, optim::FusedAdam, optim::FusedLAMB, optim::FusedAdagrad>;
TYPED_TEST_SUITE(CheckpointOfTiedWeights, OptimizersWithState);

// LibTorch's load() alone leaves such a parameter without its state.
TYPED_TEST(CheckpointOfTiedWeights, RestoresTheStateOfAParameterThatOccursTwice) {
  const TemporaryFolder folder;
  const auto train = [](at::Tensor& weight, torch::optim::Optimizer& optimizer) {
    weight.mutable_grad() = torch::full_like(weight, 0.5);
    optimizer.step();
  };
  at::Tensor weight = torch::ones({3}).requires_grad_();
  TypeParam optimizer(std::vector<at::Tensor>{weight, torch::ones({2}), weight}, 0.1);
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("weight", weight).add("optimizer", optimizer);
  train(weight, optimizer);
  checkpoint.save(1);
  train(weight, optimizer);
  const at::Tensor want = weight.detach().clone();
  checkpoint.resume();
  EXPECT_EQ(optimizer.param_groups()[0].params()[2].unsafeGetTensorImpl(),
            weight.unsafeGetTensorImpl());
  EXPECT_EQ(optimizer.state().size(), 1);
  train(weight, optimizer);
  EXPECT_TRUE(same_bits(weight.detach(), want));
}

// As docs/training_loop.md says.
TEST(Checkpoint, IsLoadedByADivergenceGuardAfterTheUpdateOfAGradScaler) {
  const TemporaryFolder folder;
  torch::nn::Linear net(3, 2);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  amp::GradScaler scaler(amp::LossScaleOptions().init_scale(4));
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("net", net).add("sgd", sgd).add("scaler", scaler);
  checkpoint.save(1);
  const auto before = semitone::test::copies(net->parameters());
  amp::DivergenceGuard guard(
      amp::DivergenceGuardOptions().rollback([&](const DivergedError&) { checkpoint.resume(); }));
  scaler.scale(net(torch::ones({4, 3})).sum()).backward();
  const auto step = scaler.step(sgd);
  scaler.update();
  EXPECT_FALSE(same_bits(semitone::test::copies(net->parameters()), before));
  const at::Tensor loss = torch::full({}, std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(guard.observe(loss, step), amp::DivergenceGuard::Observed::rolled_back);
  EXPECT_TRUE(same_bits(semitone::test::copies(net->parameters()), before));
  scaler.scale(net(torch::ones({4, 3})).sum()).backward();
  scaler.step(sgd);
  scaler.update();
}

// LibTorch's Adagrad makes its state in the constructor, and a FusedAdagrad with the first gradient.
TEST(Checkpoint, OfAFusedAdagradContinuesWithLibTorchs) {
  const TemporaryFolder folder;
  at::Tensor head = torch::ones({2}).requires_grad_();
  at::Tensor body = torch::ones({3}).requires_grad_();
  head.mutable_grad() = torch::ones({2});
  optim::FusedAdagrad fused({head, body}, optim::FusedAdagradOptions(0.1));
  fused.step();
  Checkpoint(folder / "run").add("optimizer", fused).save(1);
  torch::optim::Adagrad plain({head, body},
                              torch::optim::AdagradOptions(0.1).initial_accumulator_value(0.5));
  Checkpoint reader(folder / "run");
  reader.add("optimizer", plain);
  EXPECT_EQ(reader.resume(), 1);
  body.mutable_grad() = torch::ones({3});
  const at::Tensor before = head.detach().clone();
  plain.step();
  // The second step of the one, and the first one of the other.
  EXPECT_TRUE(torch::allclose(head, before - 0.1 / std::sqrt(2)));
  EXPECT_TRUE(torch::allclose(body, torch::full({3}, 0.9)));
}

// A program that looks at the validation loss in InferenceMode, and goes back.
TEST(Checkpoint, CanBeResumedInInferenceMode) {
  const semitone::test::TemporaryFolder folder;
  torch::nn::Linear net(3, 2);
  torch::optim::Adam adam(net->parameters(), 0.1);
  at::Tensor mean;
  const auto step = [&] {
    adam.zero_grad();
    net(torch::ones({4, 3})).sum().backward();
    adam.step();
  };
  step();
  mean = net->bias.detach().clone();
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("net", net).add("adam", adam).add("mean", mean);
  checkpoint.save(1);
  const auto before = semitone::test::copies(net->parameters());
  step();
  {
    const c10::InferenceMode inference;
    mean = at::Tensor();
    EXPECT_EQ(checkpoint.resume(), 1);
  }
  EXPECT_TRUE(same_bits(semitone::test::copies(net->parameters()), before));
  step();
  mean.add_(1);
  EXPECT_EQ(checkpoint.resume(), 1);
  EXPECT_TRUE(torch::equal(mean, net->bias));
}

TEST(Checkpoint, RestoresExpandedTensors) {
  const TemporaryFolder folder;
  torch::nn::Linear model(2, 2);
  at::Tensor mask = model->register_buffer("mask", torch::arange(5.0).unsqueeze(0).expand({8, 5}));
  const at::Tensor want = mask.clone();
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("model", model).add("mask", mask);
  checkpoint.save(1);
  mask.select(0, 0).zero_();
  checkpoint.resume();
  EXPECT_TRUE(same_bits(mask, want));
  EXPECT_EQ(mask.stride(0), 0);
}

// Their storage has no address.
TEST(Checkpoint, RestoresTensorsWithoutElements) {
  for (const bool in_background : {false, true}) {
    const TemporaryFolder folder;
    torch::nn::Linear model(2, 2);
    model->register_buffer("history", torch::empty({0, 5}));
    at::Tensor value = torch::empty({0}, torch::kLong);
    const at::Tensor weight = model->weight.detach().clone();
    Checkpoint checkpoint(folder / "run");
    checkpoint.add("model", model).add("value", value);
    if (in_background) {
      checkpoint.save_async(1);
      checkpoint.wait();
    } else {
      checkpoint.save(1);
    }
    model->weight.data().zero_();
    EXPECT_EQ(checkpoint.resume(), 1);
    EXPECT_TRUE(same_bits(model->weight.detach(), weight));
    EXPECT_EQ(model->named_buffers()["history"].sizes(), at::IntArrayRef({0, 5}));
    EXPECT_EQ(value.sizes(), at::IntArrayRef({0}));
  }
}

// As torch::load() of LibTorch's optimizers keeps them.
template <typename Optimizer, typename Options>
void expect_options_in_place(bool fails) {
  struct Last {
    void save(torch::serialize::OutputArchive&) const {}
    void load(torch::serialize::InputArchive&) {  // later, it puts the earlier state back
      if (std::exchange(throws, false)) throw Error("test", "nothing", "something");
    }
    bool throws;
  } last{fails};
  const TemporaryFolder folder;
  torch::nn::Linear model(2, 2);
  Optimizer optimizer(model->parameters(), Options(0.5));
  auto& options = optimizer.param_groups()[0].options();
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("model", model).add("optimizer", optimizer).add("last", last);
  checkpoint.save(1);
  options.set_lr(0.25);
  if (fails) {
    EXPECT_THROW(checkpoint.resume(), FileError);
  } else {
    EXPECT_EQ(checkpoint.resume(), 1);
  }
  EXPECT_EQ(&optimizer.param_groups()[0].options(), &options);
  EXPECT_EQ(options.get_lr(), fails ? 0.25 : 0.5);
}

TEST(Checkpoint, RestoresOptionsInPlace) {
  for (const bool fails : {false, true}) {
    SCOPED_TRACE(fails);
    expect_options_in_place<optim::FusedAdam, optim::FusedAdamOptions>(fails);
    expect_options_in_place<torch::optim::AdamW, torch::optim::AdamWOptions>(fails);
  }
}

// Its state would be lost without a word.
TEST(Checkpoint, RefusesAnOptimizerThatDoesNotSaveItself) {
  const TemporaryFolder folder;
  torch::nn::Linear model(2, 2);
  semitone::test::OwnOptimizer optimizer(model->parameters());
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("model", model).add("optimizer", optimizer);
  semitone::test::expect_error([&] { checkpoint.save(1); },
                               {"[checkpoint]", "'optimizer'", "override save() and load()"});
}

// As of a class whose first step makes a tensor: LibTorch cannot save an undefined one.
TEST(Checkpoint, RestoresAnObjectThatCannotBeSavedYet) {
  struct Mean {
    void save(torch::serialize::OutputArchive& archive) const { archive.write("mean", mean, true); }
    void load(torch::serialize::InputArchive& archive) { archive.read("mean", mean, true); }
    at::Tensor mean;
  };
  const TemporaryFolder folder;
  Mean mean{torch::ones({3})};
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("mean", mean);
  checkpoint.save(1);
  Mean fresh;
  Checkpoint resumed(folder / "run");
  resumed.add("mean", fresh);
  EXPECT_EQ(resumed.resume(), 1);
  EXPECT_TRUE(same_bits(fresh.mean, mean.mean));
}

TEST(Checkpoint, OfAViewHasItsOwnElementsOnly) {
  const TemporaryFolder folder;
  const at::Tensor all = torch::arange(1 << 20);
  at::Tensor row = all.view({1 << 10, 1 << 10})[3];
  const at::Tensor values = row.clone();
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("row", row);
  checkpoint.save(1);
  std::uintmax_t bytes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder / "run"))
    if (entry.is_regular_file()) bytes += entry.file_size();
  EXPECT_LT(bytes, 1U << 20);
  row.zero_();
  EXPECT_EQ(checkpoint.resume(), 1);
  EXPECT_TRUE(same_bits(row, values));
}

TEST(Checkpoint, RefusesSparseTensors) {
  const TemporaryFolder folder;
  torch::nn::Linear model(2, 2);
  model->register_buffer("mask", torch::eye(2).to_sparse());
  at::Tensor value = torch::eye(2).to_sparse();
  Checkpoint of_model(folder / "run");
  of_model.add("model", model);
  semitone::test::expect_error([&] { of_model.save(1); }, {"dense", "'mask'", "Sparse"});
  Checkpoint of_value(folder / "run");
  of_value.add("value", value);
  semitone::test::expect_error([&] { of_value.save(1); }, {"dense", "Sparse"});
}

// LibTorch reads both with the dtype of the first, and the values of one of them wrong.
TEST(Checkpoint, RefusesTensorsOfTwoDtypesInTheSameMemory) {
  const TemporaryFolder folder;
  torch::nn::Linear model(2, 2);
  const at::Tensor rotations = torch::ones({3}, torch::kComplexFloat);
  model->register_buffer("parts", torch::view_as_real(rotations));
  model->register_buffer("rotations", rotations);
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("model", model);
  semitone::test::expect_error([&] { checkpoint.save(1); },
                               {"one dtype", "'parts' (float32)", "'rotations' (complex64)"});
  EXPECT_THAT(checkpoint.steps(), testing::ElementsAre());
}

TEST(Checkpoint, StaysInItsDirectoryWhateverTheProcessDoes) {
  const TemporaryFolder folder;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  std::int64_t value = 1;
  Checkpoint checkpoint("run");
  checkpoint.add("value", value);
  std::filesystem::current_path(before);
  checkpoint.save(1);
  EXPECT_TRUE(std::filesystem::exists(folder / "run" / "step-00000001"));
}

TEST(Checkpoint, HasModelFilesThatLibTorchReads) {
  const TemporaryFolder folder;
  Training run({.level = "O2"});
  run.train_to(2);
  auto checkpoint = run.checkpoint(folder / "run");
  checkpoint.save(2);
  semitone::test::DropNet plain;
  torch::load(plain, checkpoint.path_of(2) / "model.pt");
  const auto fp32 = run.mixed.fp32_weights(run.net);
  EXPECT_TRUE(same_bits(semitone::test::copies(plain->parameters()),
                        semitone::test::copies(run.net->parameters())));
}

TEST(Checkpoint, SavesAModelThatNoMixedPrecisionManagesBesideOneThatItDoes) {
  const TemporaryFolder folder;
  Training run({.level = "O2"});
  semitone::test::DropNet average;
  auto checkpoint = run.checkpoint(folder / "run");
  checkpoint.add("average", average);
  checkpoint.save(1);
  const auto want = semitone::test::copies(average->parameters());
  {
    const torch::NoGradGuard no_grad;
    for (const at::Tensor& p : average->parameters()) p.zero_();
  }
  EXPECT_EQ(checkpoint.resume(), 1);
  EXPECT_TRUE(same_bits(semitone::test::copies(average->parameters()), want));
}

}  // namespace
}  // namespace semitone::checkpoint::test
