// All fused optimizers: saving and loading.

#include "semitone/optim/fused_optimizer.h"
#include "src/optim/fused_state.h"
#include "tests/optim/fused_optimizers_fixture.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <initializer_list>
#include <sstream>
#include <string>
#include <string_view>
#include <typeindex>
#include <typeinfo>
#include <vector>

namespace semitone::test::fused_optimizer_io_test {
namespace {

using optim::FusedOptimizer;

std::string saved(const FusedOptimizer& optimizer) {
  std::ostringstream file;
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  archive.save_to(file);
  return file.str();
}

void load(FusedOptimizer& optimizer, const std::string& bytes) {
  std::istringstream file(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(file);
  optimizer.load(archive);
}

TEST_P(FusedOptimizers, GoOnBitForBitFromAFile) {
  const auto dtype = GetParam().splits_masters ? at::kBFloat16 : at::kFloat;
  const auto parameters = make_parameters(dtype);
  parameters[4].set_data(parameters[4].detach().contiguous(at::MemoryFormat::ChannelsLast));
  const auto optimizer = GetParam()(parameters);
  for (int i = 0; i < 3; ++i) {
    auto grads = make_grads(parameters);
    if (i == 0) grads[2] = at::Tensor();
    grads[1] = at::Tensor();  // never
    plain_step(*optimizer, parameters, grads);
    optimizer->param_groups()[0].options().set_lr(0.001 * (i + 1));
  }
  const auto resumed_parameters = leaves_like(parameters);
  const auto resumed = GetParam()(resumed_parameters);
  plain_step(*resumed, leaves_like(parameters), make_grads(parameters));  // state that must go away
  load(*resumed, saved(*optimizer));
  expect_bitwise_equal(everything(*resumed), everything(*optimizer));
  EXPECT_EQ(resumed->param_groups()[0].options().get_lr(), 0.003);
  EXPECT_EQ(saved(*resumed), saved(*optimizer)) << "files have no addresses in them";
  for (int i = 0; i < 3; ++i) {
    const auto grads = make_grads(parameters);
    plain_step(*optimizer, parameters, grads);
    plain_step(*resumed, resumed_parameters, grads);
    expect_bitwise_equal(everything(*resumed), everything(*optimizer));
  }
}

TEST_P(FusedOptimizers, CanBeSavedBeforeTheFirstStep) {
  const auto parameters = make_parameters();
  const auto optimizer = GetParam()(parameters);
  const auto bytes = saved(*optimizer);
  plain_step(*optimizer, parameters, make_grads(parameters));
  load(*optimizer, bytes);
  EXPECT_TRUE(optimizer->state().empty());
}

TEST_P(FusedOptimizers, WorkWithTorchSaveAndLoad) {
  const auto parameters = make_parameters();
  const auto optimizer = GetParam()(parameters);
  plain_step(*optimizer, parameters, make_grads(parameters));
  std::stringstream file;
  torch::save(*optimizer, file);
  const auto other = GetParam()(parameters);
  torch::load(*other, file);
  expect_bitwise_equal(everything(*other), everything(*optimizer));
}

TEST_P(FusedOptimizers, CanBeLoadedInInferenceMode) {
  // fp64 is for the reference, which writes through ATen.
  const auto dtype = GetParam().splits_masters ? at::kBFloat16 : at::kDouble;
  const auto parameters = make_parameters(dtype);
  const auto optimizer = GetParam()(parameters);
  plain_step(*optimizer, parameters, make_grads(parameters));
  const auto bytes = saved(*optimizer);
  std::vector<std::vector<at::Tensor>> ends;
  for (const bool in_inference_mode : {false, true}) {
    const auto leaves = leaves_like(parameters);
    const auto other = GetParam()(leaves);
    {
      const c10::InferenceMode mode(in_inference_mode);
      load(*other, bytes);
    }
    torch::manual_seed(4);
    plain_step(*other, leaves, make_grads(leaves));
    ends.push_back(everything(*other));
  }
  expect_bitwise_equal(ends[1], ends[0]);
}

// As every OptimizerParamState of LibTorch: amp::MasterWeights moves state by these functions.
TEST_P(FusedOptimizers, HaveStateThatCanBeSerializedByItself) {
  const auto weight =
      torch::randn({9}).to(GetParam().splits_masters ? at::kBFloat16 : at::kFloat).requires_grad_();
  const auto optimizer = GetParam()(std::vector<at::Tensor>{weight});
  for (int i = 0; i < 2; ++i) plain_step(*optimizer, {weight}, make_grads({weight}));
  const auto& state =
      static_cast<const optim::FusedState&>(*optimizer->state().at(weight.unsafeGetTensorImpl()));
  torch::serialize::OutputArchive written;
  state.serialize(written);
  std::stringstream file;
  written.save_to(file);
  torch::serialize::InputArchive archive;
  archive.load_from(file);
  optim::FusedState read;
  read.tensors.fill(torch::ones({1}));  // must go away where there is none
  read.master_low = torch::ones({1});
  read.serialize(archive);
  EXPECT_EQ(read.step, 2);
  for (std::size_t k = 0; k < read.tensors.size(); ++k)
    expect_bitwise_equal(read.tensors[k], state.tensors[k]);
  expect_bitwise_equal(read.master_low, state.master_low);
}

TEST_P(FusedOptimizers, RefuseFilesThatDoNotFitAndChangeNothing) {
  const auto parameters = make_parameters();
  const auto optimizer = GetParam()(parameters);
  plain_step(*optimizer, parameters, make_grads(parameters));
  const auto before = everything(*optimizer);
  const auto expect_refused = [&](const std::string& bytes,
                                  std::initializer_list<std::string_view> parts) {
    EXPECT_THROW(load(*optimizer, bytes), FileError);
    expect_error([&] { load(*optimizer, bytes); }, parts);
    expect_bitwise_equal(everything(*optimizer), before);
  };

  const auto fewer = GetParam()(std::vector<at::Tensor>{parameters[0]});
  expect_refused(saved(*fewer), {"[optim.load]", "5 parameters in group 0", "got 1"});
  fewer->add_param_group(torch::optim::OptimizerParamGroup({parameters[1]}));
  expect_refused(saved(*fewer), {"1 parameter groups", "got 2"});

  auto others = make_parameters();
  others[4] = torch::randn({3}).requires_grad_();
  const auto other_shapes = GetParam()(others);
  plain_step(*other_shapes, others, make_grads(others));
  if (!other_shapes->state_of(others[4], GetParam().first_state).defined()) return;
  expect_refused(saved(*other_shapes), {"of shape [2, 3, 4, 5]", "got [3]"});
}

TEST_P(FusedOptimizers, RefuseFilesOfOtherRulesAndChangeNothing) {
  const auto parameters = make_parameters();
  const auto optimizer = GetParam()(parameters);
  plain_step(*optimizer, parameters, make_grads(parameters));
  const auto before = everything(*optimizer);
  // LARC has SGD's state and options, and more of its own.
  const auto rule = [](const FusedOptimizer& of) {
    return dynamic_cast<const optim::LARC*>(&of) != nullptr
               ? std::type_index(typeid(optim::FusedSGD))
               : std::type_index(typeid(of));
  };
  for (const Kind& kind : all_fused_optimizers()) {
    const auto others = make_parameters();
    const auto other = kind(others);
    plain_step(*other, others, make_grads(others));
    if (rule(*other) == rule(*optimizer)) continue;
    SCOPED_TRACE(kind.name);
    EXPECT_THROW(load(*optimizer, saved(*other)), FileError);
    expect_error([&] { load(*optimizer, saved(*other)); },
                 {"[optim.load]", "of an optimizer with the same rule"});
    expect_bitwise_equal(everything(*optimizer), before);
  }
}

// Its state has an entry for a parameter that has a momentum buffer only.
TEST(FusedSGDFiles, WithoutMomentumAreLibTorchsSgdsBeforeItHasMomentum) {
  const at::Tensor weight = torch::ones({3}).requires_grad_();
  weight.mutable_grad() = torch::ones({3});
  optim::FusedSGD fused({weight}, 0.1);
  fused.step();
  std::stringstream file;
  torch::save(fused, file);
  torch::optim::SGD plain({weight}, 0.1);
  torch::load(plain, file);
  static_cast<torch::optim::SGDOptions&>(plain.param_groups()[0].options()).momentum(0.9);
  plain.step();
  EXPECT_TRUE(torch::allclose(weight, torch::full({3}, 0.8)));
  file.seekg(0);
  optim::FusedSGD again({weight}, 0.1);
  torch::load(again, file);
  EXPECT_EQ(again.steps_of(weight), 1);
}

// Adam's step takes a state that exists for complete.
TEST(FusedAdamFiles, OfSplitMastersBeforeTheFirstStepAreLibTorchs) {
  const at::Tensor weight = torch::ones({3}).to(at::kBFloat16).requires_grad_();
  optim::FusedAdam fused({weight}, optim::FusedAdamOptions(0.1).split_master(true));
  fused.set_master(weight, torch::full({3}, 1.001));
  std::stringstream file;
  torch::save(fused, file);
  const at::Tensor wide = torch::ones({3}).requires_grad_();
  wide.mutable_grad() = torch::ones({3});
  torch::optim::AdamW plain({wide}, 0.1);
  torch::load(plain, file);
  plain.step();
  EXPECT_LT(wide.max().item<float>(), 1);
  file.seekg(0);
  optim::FusedAdam again({weight}, optim::FusedAdamOptions(0.1).split_master(true));
  torch::load(again, file);
  EXPECT_TRUE(torch::equal(again.master_of(weight), torch::full({3}, 1.001)));
}

// How numbers are stored is the program's choice, and the lower halves are a part of its weights.
TEST(FusedAdamFiles, OfOtherStorageLeaveSplitMastersAndBf16State) {
  const auto narrow = [] { return torch::ones({3}).to(at::kBFloat16).requires_grad_(); };
  const auto file_of = [](torch::optim::Optimizer& optimizer, const at::Tensor& weight) {
    weight.mutable_grad() = torch::ones_like(weight);
    optimizer.step();
    std::stringstream file;
    torch::save(optimizer, file);
    return file;
  };
  const at::Tensor of_libtorch = torch::ones({3}).requires_grad_();
  torch::optim::AdamW libtorch({of_libtorch}, 0.1);
  const at::Tensor of_plain = narrow();
  optim::FusedAdam plain({of_plain}, optim::FusedAdamOptions(0.1));
  std::stringstream before_a_step;
  torch::save(plain, before_a_step);
  std::vector<std::stringstream> files;
  files.push_back(file_of(libtorch, of_libtorch));
  files.push_back(file_of(plain, of_plain));
  files.push_back(std::move(before_a_step));
  for (std::stringstream& file : files) {
    const at::Tensor weight = narrow();
    optim::FusedAdam fused({weight},
                           optim::FusedAdamOptions(0.2).split_master(true).bf16_state(true));
    fused.set_master(weight, torch::full({3}, 1.001));
    torch::load(fused, file);
    EXPECT_TRUE(torch::equal(fused.master_of(weight), torch::full({3}, 1.001)));
    const auto& options =
        static_cast<const optim::FusedAdamOptions&>(fused.param_groups()[0].options());
    EXPECT_EQ(options.lr(), 0.1);
    EXPECT_TRUE(options.split_master());
    EXPECT_TRUE(options.bf16_state());
    weight.mutable_grad() = torch::ones_like(weight);
    fused.step();
    EXPECT_EQ(fused.state_of(weight, "exp_avg").scalar_type(), at::kBFloat16);
    EXPECT_FALSE(torch::equal(fused.master_of(weight), weight.to(at::kFloat)));
  }
}

TEST_P(FusedOptimizers, RefuseFilesWithOptionsOutOfRangeAndChangeNothing) {
  const auto parameters = make_parameters();
  const auto optimizer = GetParam()(parameters);
  plain_step(*optimizer, parameters, make_grads(parameters));
  const auto before = everything(*optimizer);
  const double lr = optimizer->param_groups()[0].options().get_lr();
  const auto bad = GetParam()(make_parameters());
  bad->param_groups()[0].options().set_lr(-1);
  expect_error([&] { load(*optimizer, saved(*bad)); }, {"lr of at least 0", "-1"});
  EXPECT_EQ(optimizer->param_groups()[0].options().get_lr(), lr);
  expect_bitwise_equal(everything(*optimizer), before);
}

TEST_P(FusedOptimizers, RefuseArchivesOfSomethingElse) {
  const auto optimizer = GetParam()(make_parameters());
  const auto refuse = [&](const std::function<void(torch::serialize::OutputArchive&)>& fill) {
    std::ostringstream file;
    torch::serialize::OutputArchive archive;
    fill(archive);
    archive.save_to(file);
    EXPECT_THROW(load(*optimizer, file.str()), FileError);
  };
  refuse([](auto&) {});
  refuse([](auto& archive) { archive.write("pytorch_version", c10::IValue("1.5.0")); });
  refuse([](auto& archive) { archive.write("pytorch_version", c10::IValue("0.9")); });
  refuse([](auto& archive) { archive.write("pytorch_version", c10::IValue(1)); });
  refuse([](auto& archive) {
    archive.write("pytorch_version", c10::IValue("1.5.0"));
    archive.write("state", torch::ones({3}));
    archive.write("param_groups", torch::ones({3}));
  });
}

}  // namespace
}  // namespace semitone::test::fused_optimizer_io_test
