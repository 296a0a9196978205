// Checkpoints that do not fit, and wrong use: errors after which everything is as it was.

#include "semitone/checkpoint.h"
#include "tests/checkpoint/training.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace semitone::checkpoint::test {
namespace misfit {
namespace {

using semitone::test::expect_error;
using semitone::test::message_of;
using semitone::test::TemporaryFolder;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(CheckpointMisfit, OfAnIntegerIsRefused) {
  const TemporaryFolder folder;
  std::int64_t wide = 300;
  Checkpoint(folder / "run").add("value", wide).save(1);
  std::int8_t narrow = 5;
  Checkpoint reader(folder / "run");
  reader.add("value", narrow);
  EXPECT_THAT(message_of<FileError>([&] { reader.resume(); }),
              AllOf(HasSubstr("-128 to 127"), HasSubstr("'value'"), HasSubstr("300")));
  EXPECT_EQ(narrow, 5);
}

// LibTorch's load() gives one of the two parameters no state, without a word.
TEST(CheckpointMisfit, OfTiedWeightsThatAreNoLongerTiedIsRefused) {
  const TemporaryFolder folder;
  const auto stepped = [](const std::vector<at::Tensor>& parameters) {
    for (at::Tensor parameter : parameters) parameter.mutable_grad() = torch::ones({3});
    torch::optim::AdamW optimizer(parameters, 0.1);
    optimizer.step();
    return optimizer;
  };
  const at::Tensor tied = torch::ones({3}).requires_grad_();
  torch::optim::AdamW saved = stepped({tied, tied});
  Checkpoint(folder / "run").add("adam", saved).save(1);
  const at::Tensor in = torch::ones({3}).requires_grad_();
  const at::Tensor out = torch::ones({3}).requires_grad_();
  torch::optim::AdamW untied = stepped({in, out});
  const at::Tensor before =
      static_cast<torch::optim::AdamWParamState&>(*untied.state().at(out.unsafeGetTensorImpl()))
          .exp_avg()
          .clone();
  Checkpoint reader(folder / "run");
  reader.add("adam", untied);
  EXPECT_THAT(message_of<FileError>([&] { reader.resume(); }),
              AllOf(HasSubstr("a state of its own for each parameter of 'adam'"),
                    HasSubstr("which were one tensor in the saved run")));
  EXPECT_TRUE(torch::equal(
      static_cast<torch::optim::AdamWParamState&>(*untied.state().at(out.unsafeGetTensorImpl()))
          .exp_avg(),
      before));
  untied.step();
}

// It would be noticed in the first step only, after which a part of the parameters has changed.
template <typename Optimizer>
class MisfitOfStates : public ::testing::Test {};
using LibTorchsOptimizers =
    ::testing::Types<torch::optim::Adam, torch::optim::AdamW, torch::optim::RMSprop,
                     torch::optim::Adagrad, torch::optim::SGD>;
TYPED_TEST_SUITE(MisfitOfStates, LibTorchsOptimizers);

TYPED_TEST(MisfitOfStates, InAnotherOrderIsRefused) {
  const TemporaryFolder folder;
  const at::Tensor weight = torch::ones({2, 3}).requires_grad_();
  const at::Tensor bias = torch::ones({3}).requires_grad_();
  for (at::Tensor parameter : {weight, bias})
    parameter.mutable_grad() = torch::ones_like(parameter);
  const auto momentum = [](torch::optim::Optimizer& optimizer) {
    auto* const options =
        dynamic_cast<torch::optim::SGDOptions*>(&optimizer.param_groups()[0].options());
    if (options != nullptr) options->momentum(0.9);
  };
  TypeParam saved({weight, bias}, 0.1);
  momentum(saved);
  saved.step();
  Checkpoint(folder / "run").add("optimizer", saved).save(1);
  TypeParam other({bias, weight}, 0.1);
  momentum(other);
  other.step();
  Checkpoint reader(folder / "run");
  reader.add("optimizer", other);
  EXPECT_THAT(
      message_of<FileError>([&] { reader.resume(); }),
      AllOf(HasSubstr(
                "the state of a parameter of shape [3] in 'optimizer', got one of shape [2, 3]"),
            HasSubstr("in the same order")));
  other.step();  // with the state from before
}

// A module's own load() may do what it wants.
TEST(CheckpointMisfit, OfATensorOfAnotherShapeIsNotRepeated) {
  struct OneNumber : torch::nn::Module {
    OneNumber() : weight(register_parameter("weight", torch::ones({3}))) {}
    void load(torch::serialize::InputArchive&) override { weight.set_data(torch::zeros({1})); }
    at::Tensor weight;
  };
  const TemporaryFolder folder;
  const auto module = std::make_shared<OneNumber>();
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("module", *module);
  checkpoint.save(1);
  EXPECT_THAT(message_of<FileError>([&] { checkpoint.resume(); }),
              HasSubstr("expected a tensor of float32 [3], got float32 [1]"));
  EXPECT_TRUE(torch::equal(module->weight, torch::ones({3})));
}

TEST(CheckpointMisfit, OfAnotherArchitectureNamesTheFirstParameterAndChangesNothing) {
  const TemporaryFolder folder;
  std::int64_t value = 1;
  semitone::test::ToyConvNet net(3);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  Checkpoint(folder / "run").add("net", net).add("value", value).add("sgd", sgd).save(7);
  semitone::test::ToyConvNet wider(5);
  torch::optim::SGD other(wider->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  std::int64_t loaded = 2;
  Checkpoint reader(folder / "run");
  reader.add("net", wider).add("value", loaded).add("sgd", other);
  const auto before = semitone::test::copies(wider->parameters());
  EXPECT_THAT(message_of<FileError>([&] { reader.resume(); }),
              AllOf(HasSubstr("[checkpoint.resume]"), HasSubstr("'head.weight', float32 [5, 4]"),
                    HasSubstr("got float32 [3, 4]")));
  EXPECT_TRUE(same_bits(semitone::test::copies(wider->parameters()), before));
  EXPECT_EQ(loaded, 2);
  EXPECT_EQ(other.param_groups()[0].options().get_lr(), 0.2);
}

TEST(CheckpointMisfit, OfAnotherDtypeIsRefused) {
  const TemporaryFolder folder;
  semitone::test::ToyConvNet net;
  net->to(torch::kBFloat16);
  Checkpoint(folder / "run").add("net", net).save(7);
  semitone::test::ToyConvNet wide;
  Checkpoint reader(folder / "run");
  reader.add("net", wide);
  EXPECT_THAT(message_of<FileError>([&] { reader.resume(); }),
              AllOf(HasSubstr("'conv.weight', float32"), HasSubstr("got bfloat16")));
}

// A list of losses, say, that the program continues after the save.
TEST(CheckpointMisfit, OfATensorThatHasGrownSaysHowToRollBack) {
  const TemporaryFolder folder;
  at::Tensor losses = torch::arange(3.0);
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("losses", losses);
  checkpoint.save(1);
  losses = torch::arange(5.0);
  EXPECT_THAT(message_of<FileError>([&] { checkpoint.resume(); }),
              AllOf(HasSubstr("float32 [5]"), HasSubstr("got float32 [3]"),
                    HasSubstr("tensor = at::Tensor()")));
  losses = at::Tensor();
  EXPECT_EQ(checkpoint.resume(), 1);
  EXPECT_TRUE(torch::equal(losses, torch::arange(3.0)));
}

TEST(CheckpointMisfit, OfOtherObjectsIsRefused) {
  const TemporaryFolder folder;
  std::int64_t a = 1;
  std::int64_t b = 2;
  double real = 3;
  Checkpoint(folder / "run").add("a", a).add("b", b).save(1);
  const auto refused = [&](auto&& add) {
    Checkpoint reader(folder / "run");
    add(reader);
    return message_of<FileError>([&] { reader.resume(); });
  };
  EXPECT_THAT(refused([&](auto& reader) { reader.add("a", a); }), HasSubstr("none for 'b'"));
  EXPECT_THAT(refused([&](auto& reader) { reader.add("a", a).add("b", b).add("c", real); }),
              AllOf(HasSubstr("'c' (real)"), HasSubstr("got none")));
  EXPECT_THAT(refused([&](auto& reader) { reader.add("a", a).add("b", real); }),
              AllOf(HasSubstr("'b' (real)"), HasSubstr("got integer")));
}

TEST(CheckpointMisfit, OfOtherSettingsNamesAllOfThemAndChangesNothing) {
  const TemporaryFolder folder;
  std::int64_t value = 1;
  const auto checkpoint = [&] {
    Checkpoint made(folder / "run");
    made.add("value", value);
    return made;
  };
  checkpoint()
      .add_setting("--lr", "0.1")
      .add_setting("--seed", "3")
      .add_setting("--x", "=\n")
      .save(7);
  value = 2;
  const auto message = [&](Checkpoint reader) {
    const std::string by_step = message_of<FileError>([&] { reader.resume(7); });
    EXPECT_EQ(message_of<FileError>([&] { reader.resume(); }), by_step);
    EXPECT_EQ(value, 2);
    return by_step;
  };
  EXPECT_THAT(
      message(std::move(checkpoint().add_setting("--lr", "0.2").add_setting("--seed", "3"))),
      AllOf(HasSubstr("[checkpoint.resume] expected --lr 0.2, --x not set in '"),
            HasSubstr("step-00000007', got --lr 0.1, --x =\n")));
  EXPECT_THAT(message(std::move(checkpoint()
                                    .add_setting("--x", "=\n")
                                    .add_setting("--lr", "0.1")
                                    .add_setting("--seed", "3")
                                    .add_setting("--keep", "1"))),
              AllOf(HasSubstr("expected --keep 1 in"), HasSubstr("got --keep not set")));
  // Settings come before objects: another learning rate is the reason, not the missing object.
  std::int64_t other = 0;
  EXPECT_THAT(message(std::move(checkpoint().add("other", other))),
              HasSubstr("expected --lr not set"));
  auto same = checkpoint();
  same.add_setting("--seed", "3").add_setting("--x", "=\n").add_setting("--lr", "0.1");
  EXPECT_EQ(same.resume(), 7);
  EXPECT_EQ(value, 1);
  expect_error([&] { same.add_setting("--lr", "0.1"); }, {"[checkpoint.add_setting]", "twice"});
  expect_error([&] { same.add_setting("", "1"); }, {"[checkpoint.add_setting]", "a name"});
}

TEST(CheckpointMisfit, OfAnotherOptimizerLeavesEveryObjectAsItWas) {
  const TemporaryFolder folder;
  const auto stepped = [](torch::optim::Optimizer& optimizer) {
    for (const at::Tensor& p : optimizer.param_groups()[0].params())
      p.mutable_grad() = torch::ones_like(p);
    optimizer.step();
  };
  torch::nn::Linear net(2, 3);
  {
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    stepped(sgd);
    Checkpoint(folder / "run").add("net", net).add("optimizer", sgd).save(1);
  }
  torch::optim::AdamW adamw(net->parameters(), 0.1);
  stepped(adamw);
  const auto before = semitone::test::copies(net->parameters());
  const auto states = adamw.state().size();
  Checkpoint reader(folder / "run");
  reader.add("net", net).add("optimizer", adamw);
  EXPECT_THAT(message_of<FileError>([&] { reader.resume(); }),
              AllOf(HasSubstr("[checkpoint.resume]"), HasSubstr("a state for 'optimizer'")));
  EXPECT_TRUE(same_bits(semitone::test::copies(net->parameters()), before));
  EXPECT_EQ(adamw.state().size(), states);
  EXPECT_EQ(adamw.param_groups()[0].options().get_lr(), 0.1);
}

// Loads a value, and then refuses it.
struct Stubborn {
  std::int64_t value = 0;
  bool refuses = false;
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("value", c10::IValue(value));
  }
  void load(torch::serialize::InputArchive& archive) {
    c10::IValue loaded;
    archive.read("value", loaded);
    value = loaded.toInt();
    if (refuses && value == 1) throw std::runtime_error("not that one");
  }
};

TEST(CheckpointMisfit, FoundHalfwayLeavesEveryObjectAsItWas) {
  for (const char* const optimizer : kOptimizers) {
    SCOPED_TRACE(optimizer);
    const TemporaryFolder folder;
    const Setting setting{.dtype = torch::kBFloat16, .optimizer = optimizer};
    Stubborn stubborn{.value = 1};
    {
      Training saved(setting);
      saved.train_to(4);
      auto checkpoint = saved.checkpoint(folder / "run");
      checkpoint.add("stubborn", stubborn);
      checkpoint.save(4);
    }
    Training whole(setting);
    whole.train_to(9);

    Training run(setting);
    run.train_to(6);
    stubborn = {.value = 2, .refuses = true};
    auto checkpoint = run.checkpoint(folder / "run");
    checkpoint.add("stubborn", stubborn);
    EXPECT_THAT(message_of<std::runtime_error>([&] { checkpoint.resume(); }),
                HasSubstr("not that one"));
    EXPECT_EQ(stubborn.value, 2);
    run.train_to(9);
    EXPECT_TRUE(same_bits(run.state(), whole.state()));
  }
}

TEST(CheckpointUse, WithoutTheMixedPrecisionOfACastModelIsAnError) {
  const TemporaryFolder folder;
  Training run({.level = "O2"});
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("model", run.net);
  expect_error([&] { checkpoint.save(1); }, {"'model'", "add(\"mixed\", mixed)"});
  EXPECT_THAT(checkpoint.steps(), ElementsAre());
}

TEST(CheckpointUse, RefusesNamesThatAreNoFileNames) {
  std::int64_t value = 1;
  Checkpoint checkpoint("nowhere");
  for (const char* const name : {"", "a/b", "..", ".hidden", "random", "a b", "\xC3\xA4"})
    expect_error([&] { checkpoint.add(name, value); }, {"[checkpoint.add]"});
  checkpoint.add("value", value);
  expect_error([&] { checkpoint.add("value", value); }, {"'value' twice"});
}

TEST(CheckpointUse, RefusesTextThatIsNotUtf8) {
  const TemporaryFolder folder;
  Checkpoint checkpoint(folder / "run");
  expect_error([&] { checkpoint.add_setting("--data", "\xE4"); },
               {"[checkpoint.add_setting]", "in UTF-8, got --data "});
  expect_error([&] { checkpoint.add_setting("\xFF", "1"); }, {"[checkpoint.add_setting]"});
  torch::nn::Linear model(2, 2);
  model->register_buffer("gr\xF6\xDF", torch::ones({1}));
  checkpoint.add("model", model);
  expect_error([&] { checkpoint.save(1); }, {"names of tensors in UTF-8, got 'gr"});
  EXPECT_THAT(checkpoint.steps(), ElementsAre());
  checkpoint.add_setting("--data", "\xC3\xA4");
}

TEST(CheckpointUse, RefusesEmptyOnes) {
  const TemporaryFolder folder;
  std::int64_t value = 1;
  expect_error([] { Checkpoint(""); }, {"a directory", "an empty path"});
  expect_error([] { CheckpointOptions().keep(0); }, {"at least 1 checkpoint, got 0"});
  expect_error([] { CheckpointOptions().keep_best(0); }, {"at least 1 best checkpoint, got 0"});
  expect_error([&] { Checkpoint(folder / "run").save(1); }, {"call add()"});
  expect_error([&] { Checkpoint(folder / "run").add("value", value).save(-1); }, {"got -1"});
  EXPECT_FALSE(std::filesystem::exists(folder / "run"));
}

TEST(CheckpointUse, CannotBeSavedBetweenScaleLossAndStep) {
  const TemporaryFolder folder;
  Training run({.level = "O2"});
  auto checkpoint = run.checkpoint(folder / "run");
  checkpoint.save(1);
  run.mixed
      .scale_loss(run.mixed.forward(run.net, torch::randn({4, 1, 28, 28})).sum(), *run.optimizer)
      .backward();
  expect_error([&] { checkpoint.save(2); }, {"save after step()"});
  EXPECT_THAT(checkpoint.steps(), ElementsAre(1));
}

}  // namespace
}  // namespace misfit
}  // namespace semitone::checkpoint::test
