#include "semitone/autocast/model.h"

#include "semitone/core/keep_fp32.h"
#include "src/autocast/model_entries.h"
#include "tests/support/errors.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace semitone::amp::model_test {
namespace {

using test::expect_error;

struct MyNormImpl : torch::nn::Module, KeepFp32 {
  MyNormImpl() {
    register_parameter("gain", torch::ones({2}));
    register_module("child", torch::nn::Linear(2, 2));
  }
};
TORCH_MODULE(MyNorm);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    conv =
        register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 2, 3).bias(false)));
    register_module("bn", torch::nn::BatchNorm2d(2));
    register_module("plain",
                    torch::nn::BatchNorm2d(torch::nn::BatchNorm2dOptions(2).affine(false)));
    register_module("inorm",
                    torch::nn::InstanceNorm2d(torch::nn::InstanceNorm2dOptions(2).affine(true)));
    register_module("mine", MyNorm());
    register_buffer("steps", torch::zeros({1}, torch::kLong));
    register_parameter("absent", at::Tensor(), false);
  }
  torch::nn::Conv2d conv{nullptr};
};
TORCH_MODULE(Net);

std::map<std::string, ModelEntry> by_name(const Model& model) {
  std::map<std::string, ModelEntry> entries;
  for (const auto& entry : entries_of(model))
    EXPECT_TRUE(entries.emplace(entry.name, entry).second) << entry.name;
  return entries;
}

TEST(Model, ListsParametersAndBuffersByTheirFullNames) {
  const Net net;
  const auto entries = by_name(net);
  EXPECT_EQ(entries.at("conv.weight").is_parameter, true);
  EXPECT_EQ(entries.at("bn.running_mean").is_parameter, false);
  EXPECT_EQ(entries.at("steps").is_parameter, false);
  EXPECT_EQ(entries.count("absent"), 0U) << "an undefined parameter";
  EXPECT_EQ(entries.count("conv.bias"), 0U);
  std::size_t parameters = 0;
  for (const auto& [name, entry] : entries) parameters += entry.is_parameter ? 1 : 0;
  EXPECT_EQ(parameters, net->parameters().size());
  EXPECT_EQ(entries.size() - parameters, net->buffers().size());
}

TEST(Model, KeepsAffineBatchNormAndMarkedModulesInFp32) {
  const auto entries = by_name(Net());
  for (const char* kept : {"bn.weight", "bn.bias", "bn.running_mean", "bn.running_var",
                           "bn.num_batches_tracked", "mine.gain"})
    EXPECT_TRUE(entries.at(kept).keep_fp32) << kept;
  for (const char* cast :
       {"conv.weight", "plain.running_mean", "inorm.weight", "steps", "mine.child.weight"})
    EXPECT_FALSE(entries.at(cast).keep_fp32) << cast;
}

TEST(Model, KnowsBatchNormOfEveryDimension) {
  torch::nn::Sequential net(torch::nn::BatchNorm1d(2), torch::nn::BatchNorm2d(2),
                            torch::nn::BatchNorm3d(2));
  for (const auto& entry : entries_of(Model(net))) EXPECT_TRUE(entry.keep_fp32) << entry.name;
}

TEST(Model, EntriesShareTheirIdentityWithTheModel) {
  Net net;
  for (auto& entry : entries_of(Model(net))) {
    if (entry.name == "conv.weight") entry.tensor.set_data(torch::zeros({2, 1, 3, 3}));
  }
  EXPECT_EQ(net->conv->weight.sum().item<float>(), 0);
}

TEST(Model, ASharedTensorComesOncePerName) {
  struct Tied : torch::nn::Module {
    Tied() {
      const auto weight = torch::ones({2});
      register_parameter("first", weight);
      register_parameter("second", weight);
    }
  };
  const auto entries = entries_of(Model(std::make_shared<Tied>()));
  ASSERT_EQ(entries.size(), 2U);
  EXPECT_TRUE(entries[0].tensor.is_same(entries[1].tensor));
}

TEST(Model, ConvertsFromEveryWayToHoldAModule) {
  Net net;
  torch::nn::Module& reference = *net;
  const Model from_holder(net);
  const Model from_pointer(net.ptr());
  const Model from_base_pointer(std::static_pointer_cast<torch::nn::Module>(net.ptr()));
  const Model from_reference(reference);
  for (const Model& model : {from_holder, from_pointer, from_base_pointer, from_reference}) {
    EXPECT_EQ(model.module(), &reference);
    EXPECT_EQ(model.script(), nullptr);
    EXPECT_TRUE(model.is(from_holder));
  }
  EXPECT_FALSE(from_holder.is(Model(Net())));
}

TEST(Model, KeepsAliveWhatIsGivenByPointer) {
  std::weak_ptr<torch::nn::Module> watch;
  const Model model = [&] {
    Net net;
    watch = net.ptr();
    return Model(net);
  }();
  EXPECT_FALSE(watch.expired());
}

TEST(Model, RefusesEmptyHolders) {
  expect_error([] { const Model model{torch::nn::Linear(nullptr)}; },
               {"empty module holder", "construct the module"});
  expect_error([] { const Model model{std::shared_ptr<torch::nn::Module>()}; },
               {"empty module holder"});
}

// ---- TorchScript -------------------------------------------------------------------------------

torch::jit::Module script_norm(const std::string& class_name, bool affine) {
  torch::jit::Module norm(class_name);
  if (affine) {
    norm.register_parameter("weight", torch::ones({2}), false);
  } else {
    norm.register_attribute("weight", c10::NoneType::get(), c10::IValue());
  }
  norm.register_buffer("running_mean", torch::zeros({2}));
  return norm;
}

TEST(ScriptModel, ListsParametersAndBuffersByTheirFullNames) {
  torch::jit::Module net("Net");
  torch::jit::Module layer("Layer");
  layer.register_parameter("weight", torch::ones({2, 2}), false);
  net.register_module("layer", layer);
  net.register_buffer("steps", torch::zeros({1}));
  const auto entries = by_name(Model(net));
  ASSERT_EQ(entries.size(), 2U);
  EXPECT_TRUE(entries.at("layer.weight").is_parameter);
  EXPECT_TRUE(entries.at("layer.weight").tensor.is_same(layer.attr("weight").toTensor()));
  EXPECT_FALSE(entries.at("steps").is_parameter);
}

TEST(ScriptModel, KnowsBatchNormByTheNameOfItsClass) {
  torch::jit::Module net("Net");
  net.register_module("bn", script_norm("__torch__.torch.nn.modules.batchnorm.BatchNorm2d", true));
  net.register_module("sync",
                      script_norm("__torch__.torch.nn.modules.batchnorm.SyncBatchNorm", true));
  net.register_module("plain",
                      script_norm("__torch__.torch.nn.modules.batchnorm.BatchNorm1d", false));
  net.register_module("inorm",
                      script_norm("__torch__.torch.nn.modules.instancenorm.InstanceNorm2d", true));
  const auto entries = by_name(Model(net));
  EXPECT_TRUE(entries.at("bn.weight").keep_fp32);
  EXPECT_TRUE(entries.at("bn.running_mean").keep_fp32);
  EXPECT_TRUE(entries.at("sync.weight").keep_fp32);
  EXPECT_FALSE(entries.at("plain.running_mean").keep_fp32);
  EXPECT_FALSE(entries.at("inorm.weight").keep_fp32);
}

TEST(ScriptModel, IsTheSameForEveryHandleOfTheModule) {
  const torch::jit::Module net("Net");
  const torch::jit::Module handle = net;
  EXPECT_TRUE(Model(net).is(Model(handle)));
  EXPECT_FALSE(Model(net).is(Model(torch::jit::Module("Net"))));
  EXPECT_NE(Model(net).script(), nullptr);
  EXPECT_EQ(Model(net).module(), nullptr);
}

}  // namespace
}  // namespace semitone::amp::model_test
