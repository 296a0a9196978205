#include "semitone/weights/state_dict.h"

#include "semitone/amp/initialize.h"
#include "semitone/core/error.h"
#include "semitone/weights/file.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/toy_nets.h"
#include "tests/weights/fixtures.h"

#include <torch/csrc/jit/serialization/import.h>
#include <torch/optim/sgd.h>

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace semitone::weights {
namespace {

using test::difference;
using test::expect_error;
using test::TemporaryFolder;
using test::ToyNet;
using test::ToyNetOptions;

ToyNet normalised_net() {
  return ToyNet(ToyNetOptions{.normalised = true});
}

StateDict cloned(const StateDict& values) {
  StateDict copies;
  for (const auto& item : values) copies.insert(item.key(), item.value().clone());
  return copies;
}

TEST(StateDict, HasPythonsNamesInTheModelsOrder) {
  std::vector<std::string> expected{"first.weight",
                                    "first.bias",
                                    "norm.weight",
                                    "norm.bias",
                                    "norm.running_mean",
                                    "norm.running_var",
                                    "norm.num_batches_tracked",
                                    "second.weight",
                                    "second.bias"};
  EXPECT_EQ(state_dict(normalised_net()).keys(), expected);
}

TEST(StateDict, LoadsIntoTheTensorsThatTheModelHas) {
  ToyNet from = normalised_net();
  ToyNet to = normalised_net();
  const at::Tensor weight = to->first->weight;
  const UnmatchedNames unmatched = load_state_dict(to, state_dict(from));
  EXPECT_TRUE(unmatched.missing.empty() && unmatched.unexpected.empty());
  EXPECT_EQ(difference(state_dict(to), state_dict(from)), "");
  EXPECT_TRUE(to->first->weight.is_same(weight));
  EXPECT_TRUE(weight.requires_grad());
}

TEST(StateDict, MisfitsAreErrorsThatChangeNothing) {
  ToyNet net = normalised_net();
  const StateDict before = cloned(state_dict(net));
  const auto refused = [&](const StateDict& values, std::initializer_list<std::string_view> parts) {
    expect_error([&] { load_state_dict(net, values); }, parts);
    EXPECT_EQ(difference(state_dict(net), before), "");
  };
  StateDict values;
  for (const auto& item : before) {
    if (item.key() != "second.bias") values.insert(item.key(), item.value() + 1);
  }
  refused(values, {"none for 'second.bias'", "strict(false)"});
  values.insert("second.bias", torch::ones(4));
  refused(values, {"'second.bias' of shape [3]", "[4]"});
  values["second.bias"] = torch::full({3}, 1e300, torch::kDouble);
  refused(values, {"'second.bias'", "range of float32"});
  values["second.bias"] = torch::ones(3);
  values.insert("third.bias", torch::ones(3));
  refused(values, {"'third.bias', which the model does not have"});
}

TEST(StateDict, TensorsWithoutMemoryForEachElementAreErrorsThatChangeNothing) {
  for (const bool is_expanded : {true, false}) {
    torch::nn::Module model;
    const at::Tensor weight = model.register_parameter("weight", torch::zeros({2}));
    model.register_buffer(
        "b", is_expanded ? torch::zeros({1}).expand({4}) : torch::zeros({4}, torch::kMeta));
    StateDict values;
    values.insert("weight", torch::ones({2}));
    values.insert("b", torch::ones({4}));
    expect_error([&] { load_state_dict(model, values); },
                 {"'b'", is_expanded ? "an expanded tensor" : "the meta device"});
    EXPECT_TRUE(torch::equal(weight, torch::zeros({2})));
  }
}

TEST(StateDict, ValuesThatCannotBeCopiedAreErrorsThatChangeNothing) {
  torch::nn::Module model;
  const at::Tensor first = model.register_parameter("first", torch::zeros({2}));
  model.register_parameter("second", torch::zeros({2}));
  const auto refused = [&](const at::Tensor& value, std::initializer_list<std::string_view> parts) {
    StateDict values;
    values.insert("first", torch::ones({2}));
    values.insert("second", value);
    expect_error([&] { load_state_dict(model, values); }, parts);
    EXPECT_TRUE(torch::equal(first, torch::zeros({2})));
  };
  refused(torch::ones({2}).to_sparse(), {"'second' of layout Strided, got layout Sparse"});
  refused(torch::ones({2}, torch::kMeta), {"'second'", "on the meta device, without values"});
}

TEST(StateDict, NotStrictLoadsWhatMatchesAndNamesTheRest) {
  ToyNet net = normalised_net();
  StateDict values;
  values.insert("first.bias", torch::full({8}, 5.0));
  values.insert("other", torch::ones(1));
  const UnmatchedNames unmatched = load_state_dict(net, values, LoadOptions().strict(false));
  EXPECT_EQ(unmatched.unexpected, std::vector<std::string>{"other"});
  EXPECT_EQ(unmatched.missing.size(), 8U);
  EXPECT_TRUE(test::same_bytes(net->first->bias.detach(), torch::full({8}, 5.0F)));
}

TEST(StateDict, APrefixOfPythonsWrappersIsNamedAndStripped) {
  ToyNet from = normalised_net();
  ToyNet to = normalised_net();
  StateDict values;
  for (const auto& item : state_dict(from)) values.insert("module." + item.key(), item.value());
  expect_error([&] { load_state_dict(to, values); }, {"strip_prefix(\"module.\")"});
  load_state_dict(to, values, LoadOptions().strip_prefix("module."));
  EXPECT_EQ(difference(state_dict(to), state_dict(from)), "");

  StateDict twice;  // torch.compile in DistributedDataParallel
  for (const auto& item : state_dict(from))
    twice.insert("module._orig_mod." + item.key(), item.value());
  for (const char* const prefix : {"", "module."}) {
    expect_error([&] { load_state_dict(to, twice, LoadOptions().strip_prefix(prefix)); },
                 {"strip_prefix(\"module._orig_mod.\")"});
  }
  load_state_dict(to, twice, LoadOptions().strip_prefix("module._orig_mod."));
}

TEST(StateDict, APrefixOfAModuleAroundTheModelIsNamedToo) {
  ToyNet from = normalised_net();
  ToyNet to = normalised_net();
  StateDict values;
  for (const auto& item : state_dict(from)) values.insert("a.net." + item.key(), item.value());
  expect_error([&] { load_state_dict(to, values); }, {"strip_prefix(\"a.net.\")"});
}

struct TiedNetImpl : torch::nn::Module {
  TiedNetImpl() {
    encoder = register_parameter("encoder", torch::ones({2, 2}));
    register_parameter("decoder", encoder);
  }
  at::Tensor encoder;
};
TORCH_MODULE(TiedNet);

TEST(StateDict, SecondNamesAndCountersOfOldFilesAreNotMissing) {
  TiedNet tied;
  StateDict values;
  values.insert("encoder", torch::full({2, 2}, 3.0));
  load_state_dict(tied, values);
  EXPECT_TRUE(test::same_bytes(tied->encoder.detach(), torch::full({2, 2}, 3.0F)));

  ToyNet net = normalised_net();
  StateDict old;
  for (const auto& item : cloned(state_dict(net))) {
    if (item.key() != "norm.num_batches_tracked") old.insert(item.key(), item.value());
  }
  EXPECT_TRUE(load_state_dict(net, old).missing.empty());
}

// Trains a few steps at O2 in bf16, so that masters and weights differ.
struct Trained {
  ToyNet net = normalised_net();
  torch::optim::SGD optimizer{net->parameters(), 0.1};
  amp::MixedPrecision mixed;
  explicit Trained(const char* level)
      : mixed(amp::initialize(net, optimizer,
                              amp::Options(level).dtype(torch::kBFloat16).verbosity(0))) {}
  void step(const at::Tensor& x) {
    optimizer.zero_grad();
    auto loss = mixed.forward(net, x).to(torch::kFloat).square().mean();
    mixed.scale_loss(loss, optimizer).backward();
    mixed.step(optimizer);
  }
};

TEST(StateDict, OfAModelWithMastersIsTheMastersInBothDirections) {
  torch::manual_seed(0);
  const TemporaryFolder folder;
  Trained trained("O2");
  ASSERT_EQ(trained.net->first->weight.scalar_type(), torch::kBFloat16);
  for (int i = 0; i < 3; ++i) trained.step(torch::randn({4, 6}));
  save(trained.net, folder / "net.safetensors");
  const StateDict saved = read(folder / "net.safetensors").tensors;
  const at::Tensor master = saved["first.weight"];
  ASSERT_EQ(master.scalar_type(), torch::kFloat);
  EXPECT_FALSE(test::same_bytes(master, master.to(torch::kBFloat16).to(torch::kFloat)));

  Trained other("O2");
  load(other.net, folder / "net.safetensors");
  EXPECT_EQ(difference(state_dict(other.net), saved), "");
  EXPECT_TRUE(test::same_bytes(other.net->first->weight.detach(), master.to(torch::kBFloat16)));
  // A step from the same weights gives the same weights.
  const at::Tensor x = torch::randn({4, 6});
  trained.step(x);
  other.step(x);
  EXPECT_EQ(difference(state_dict(other.net), state_dict(trained.net)), "");
}

TEST(StateDict, LoadsAtEveryOptLevelBeforeAndAfterInitialize) {
  torch::manual_seed(0);
  ToyNet source = normalised_net();
  const StateDict values = cloned(state_dict(source));
  for (const char* level : {"O0", "O1", "O2", "O3"}) {
    Trained loaded(level);
    const at::Tensor x = torch::randn({4, 6});
    loaded.mixed.forward(loaded.net, x);  // fills caches of casts
    load_state_dict(loaded.net, values);
    loaded.net->eval();
    source->eval();
    const at::Tensor output = loaded.mixed.forward(loaded.net, x).to(torch::kFloat);
    EXPECT_TRUE(at::allclose(output, source->forward(x), /*rtol=*/0, /*atol=*/0.05)) << level;
  }
}

TEST(StateDict, ValuesBeyondThe16BitRangeOfAWeightAreErrors) {
  ToyNet net = normalised_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const auto mixed =
      amp::initialize(net, optimizer, amp::Options("O2").dtype(torch::kHalf).verbosity(0));
  StateDict values = cloned(state_dict(net));
  values["second.bias"].fill_(1e6);
  expect_error([&] { load_state_dict(net, values); }, {"'second.bias'", "range of float16"});
}

TEST(StateDict, OfAnyFormatIsLoadedByMixedPrecision) {
  torch::manual_seed(0);
  const TemporaryFolder folder;
  ToyNet source = normalised_net();
  for (const char* file : {"net.safetensors", "net.pt"}) {
    save(source, folder / file);
    Trained trained("O2");
    trained.mixed.load_model(trained.net, folder / file);
    EXPECT_EQ(difference(state_dict(trained.net), state_dict(source)), "") << file;
  }
}

TEST(StateDict, MixedPrecisionRefusesNamesThatTheModelDoesNotHave) {
  const TemporaryFolder folder;
  Trained trained("O2");
  const StateDict before = cloned(state_dict(trained.net));
  StateDict values = cloned(before);
  values["first.bias"].fill_(7);
  values.insert("other", torch::ones(1));
  write(folder / "a.pt", values);
  expect_error([&] { trained.mixed.load_model(trained.net, folder / "a.pt"); },
               {"[weights.load]", "a.pt'", "'other', which the model does not have"});
  EXPECT_EQ(difference(state_dict(trained.net), before), "");
}

TEST(StateDict, LoadsATorchScriptModule) {
  const TemporaryFolder folder;
  test::write_text(folder / "script.pt", test::python_file("script.pt"));
  torch::jit::Module module = torch::jit::load((folder / "script.pt").string());
  StateDict values = cloned(state_dict(module));
  EXPECT_EQ(difference(values, test::expected_tensors("state_dict")), "");
  for (auto& item : values) item.value() += 1;
  load_state_dict(module, values);
  EXPECT_EQ(difference(state_dict(module), values), "");
}

// Its file has tensors that are neither parameters nor buffers.
TEST(StateDict, LoadsATorchScriptModuleFromItsOwnFile) {
  const TemporaryFolder folder;
  torch::jit::Module inner("Inner");
  inner.register_attribute("anchors", at::TensorType::get(), torch::arange(4.0));
  torch::jit::Module module("Net");
  module.register_parameter("weight", torch::zeros({2}), /*is_buffer=*/false);
  module.register_module("inner", inner);
  module.register_attribute("more", c10::ListType::ofTensors(),
                            c10::List<at::Tensor>({torch::ones(2)}));
  module.save((folder / "net.pt").string());
  module.attr("weight").toTensor().data().fill_(1);
  EXPECT_EQ(read(folder / "net.pt").tensors.size(), 3U);
  const UnmatchedNames unmatched = load(module, folder / "net.pt");
  EXPECT_EQ(unmatched.unexpected.size(), 0U);
  EXPECT_TRUE(torch::equal(module.attr("weight").toTensor(), torch::zeros({2})));
}

TEST(StateDict, LoadsUnderInferenceModeAndIntoItsTensors) {
  const c10::InferenceMode mode;
  ToyNet net = normalised_net();
  const StateDict values = cloned(state_dict(normalised_net()));
  load_state_dict(net, values);
  EXPECT_EQ(difference(state_dict(net), values), "");
}

}  // namespace
}  // namespace semitone::weights
