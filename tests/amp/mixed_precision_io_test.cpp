// Saving and loading with a MixedPrecision: fp32 weights, model files, training state.

#include "semitone/amp/initialize.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/scaling/detail/loss_scale_state.h"
#include "src/autocast/model_entries.h"
#include "tests/support/archive.h"
#include "tests/support/captured_log.h"
#include "tests/support/errors.h"
#include "tests/support/levels.h"
#include "tests/support/optimizers.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"
#include "tests/support/toy_nets.h"

#include <torch/csrc/autograd/variable.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

namespace semitone::amp::mixed_precision_io_test {
namespace {

using c10::ScalarType;
using test::archived;
using test::kDtypes;
using test::kLevels;
using test::message_of;
using test::same_bits;
using test::saved;
using test::TemporaryFolder;
using test::ToyConvNet;
using testing::HasSubstr;

ToyConvNet make_net(std::uint64_t seed = 5) {
  torch::manual_seed(seed);
  return ToyConvNet();
}

at::Tensor images(int step = 0) {
  torch::manual_seed(100 + static_cast<std::uint64_t>(step));
  return torch::randn({4, 2, 5, 5});
}

std::vector<at::Tensor> tensors_of(const Model& model) {
  std::vector<at::Tensor> all;
  for (const ModelEntry& entry : entries_of(model)) all.push_back(entry.tensor.clone());
  return all;
}

std::unique_ptr<torch::optim::Optimizer> sgd(const std::vector<at::Tensor>& parameters) {
  return std::make_unique<torch::optim::SGD>(parameters,
                                             torch::optim::SGDOptions(0.05).momentum(0.9));
}

Options options(const std::string& level, ScalarType dtype = torch::kBFloat16) {
  Options made(level);
  return made.dtype(dtype).verbosity(0);
}

// A model, its optimizer and its MixedPrecision.
struct Training {
  explicit Training(const Options& given, std::uint64_t seed = 5,
                    const decltype(test::OptimizerKind::make)& make = sgd)
      : net(make_net(seed)),
        optimizer(make(net->parameters())),
        mixed(initialize(net, *optimizer, given)) {}

  // One iteration on the images of that step; at some steps a gradient overflows.
  Step train(int step, bool overflow = false) {
    optimizer->zero_grad();
    auto loss = mixed.scale_loss(mixed.forward(net, images(step)).pow(2).mean(), *optimizer);
    loss.value().backward();
    if (overflow) {
      net->head->bias.mutable_grad()[0] = std::numeric_limits<float>::infinity();
    }
    loss.finish();
    return mixed.step(*optimizer);
  }

  // Weights, buffers and masters.
  std::vector<at::Tensor> everything() const {
    std::vector<at::Tensor> all = tensors_of(net);
    for (const at::Tensor& p : mixed.master_params(*optimizer)) all.push_back(p.detach().clone());
    return all;
  }

  ToyConvNet net;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  MixedPrecision mixed;
};

// ------------------------------------------------------------------ fp8

Options fp8_options(const std::string& level, ScalarType dtype) {
  return options(level, dtype)
      .policy(CastPolicy::semitone({torch::kCPU, dtype}).fp8(Fp8Options().amax_history(3)));
}

std::vector<float> scales_of(const MixedPrecision& mixed) {
  std::vector<float> all;
  for (const auto& scales : mixed.fp8_scaling().scales())
    all.insert(all.end(), {scales.input_scale, scales.weight_scale, scales.grad_output_scale});
  return all;
}

// Each step is one of the history, a skipped one too, and a resumed run has the same scales.
TEST(MixedPrecisionInFp8, GoesOnBitForBit) {
  for (const auto dtype : kDtypes) {
    for (const std::string level : {"O1", "O2", "O3"}) {
      SCOPED_TRACE(level + " " + dtype_name(dtype));
      Training whole(fp8_options(level, dtype));
      EXPECT_THAT(scales_of(whole.mixed), testing::Each(0));
      whole.train(0);
      const auto first = scales_of(whole.mixed);
      EXPECT_THAT(first, testing::Each(testing::Gt(0)));
      for (int step = 1; step < 5; ++step)
        whole.train(step, /*overflow=*/level != "O3" && step == 2);
      EXPECT_NE(scales_of(whole.mixed), first);
      auto state = saved(whole.mixed);
      Training resumed(fp8_options(level, dtype), /*seed=*/6);
      {
        const auto to = resumed.mixed.fp32_weights(resumed.net);
        const auto from = whole.mixed.fp32_weights(whole.net);
        const torch::NoGradGuard no_grad;
        const auto values = entries_of(Model(whole.net));
        const auto targets = entries_of(Model(resumed.net));
        for (std::size_t i = 0; i < values.size(); ++i) targets[i].tensor.copy_(values[i].tensor);
      }
      resumed.mixed.load(state);
      EXPECT_EQ(scales_of(resumed.mixed), scales_of(whole.mixed));
      auto momentum = saved(*whole.optimizer);
      resumed.optimizer->load(momentum);
      for (int step = 5; step < 9; ++step) {
        whole.train(step);
        resumed.train(step);
      }
      EXPECT_TRUE(same_bits(resumed.everything(), whole.everything()));
      EXPECT_EQ(scales_of(resumed.mixed), scales_of(whole.mixed));
    }
  }
}

TEST(MixedPrecisionLoad, ReferencesToScalersStay) {
  Training run(options("O2", torch::kHalf));
  const LossScaler& scaler = run.mixed.loss_scaler();
  auto state = saved(run.mixed);
  for (int step = 0; step < 2; ++step) run.train(step, /*overflow=*/true);
  const double before = scaler.scale();
  run.mixed.load(state);
  EXPECT_EQ(&scaler, &run.mixed.loss_scaler());
  EXPECT_GT(scaler.scale(), before);
}

TEST(MixedPrecisionLoad, SaysWhichOptionsOfTheLossScaleStayThoseOfTheSavedRun) {
  const auto rule = [](std::int64_t interval, std::int64_t skips) {
    return options("O2", torch::kHalf)
        .loss_scale("dynamic")
        .loss_scale_options(
            LossScaleOptions().growth_interval(interval).max_consecutive_skips(skips));
  };
  Training run(rule(500, 50));
  auto state = saved(run.mixed);
  Training other(rule(2000, 70));
  const test::CapturedLog log;
  other.mixed.load(state);
  EXPECT_THAT(log.text(), HasSubstr("loss scale 0 keeps the options of the saved run: "
                                    "growth_interval 500 (here 2000)"));
  EXPECT_EQ(other.mixed.loss_scaler().options().growth_interval(), 500);
  EXPECT_EQ(other.mixed.loss_scaler().options().max_consecutive_skips(), 70);

  Training constant(options("O2", torch::kHalf).loss_scale(128.0));
  constant.mixed.load(state);
  EXPECT_THAT(log.text(), HasSubstr("dynamic true (here false)"));
}

TEST(MixedPrecisionLoad, SaysThatTheSavedRunHadNoMasters) {
  Training without(options("O2").master_weights(false));
  auto state = saved(without.mixed);
  Training with(options("O2"));
  EXPECT_THAT(message_of<FileError>([&] { with.mixed.load(state); }),
              HasSubstr("master_weights(false), set it here too"));
}

TEST(MixedPrecisionInFp8, DiffersFrom16BitsAndIsNamedInErrors) {
  Training in_fp8(fp8_options("O1", torch::kBFloat16));
  Training in_bf16(options("O1"));
  const auto loss_of = [](Training& run) {
    return run.mixed.forward(run.net, images()).pow(2).mean().item<double>();
  };
  EXPECT_NE(loss_of(in_fp8), loss_of(in_bf16));
  EXPECT_NEAR(loss_of(in_fp8), loss_of(in_bf16), 0.2 * loss_of(in_bf16));
  EXPECT_THAT(message_of<Error>([&] { in_bf16.mixed.fp8_scaling(); }), HasSubstr("fp8()"));
}

TEST(MixedPrecisionInFp8, BeginsAndEndsWithinARun) {
  Training in_fp8(fp8_options("O1", torch::kBFloat16));
  Training in_bf16(options("O1"));
  auto without = saved(in_bf16.mixed);
  in_fp8.mixed.load(without);
  EXPECT_THAT(scales_of(in_fp8.mixed), testing::Each(0));
  in_fp8.train(0);
  EXPECT_THAT(scales_of(in_fp8.mixed), testing::Each(testing::Gt(0)));
  auto with = saved(in_fp8.mixed);
  EXPECT_NO_THROW(in_bf16.mixed.load(with));
}

// ------------------------------------------------------------------ fp32_weights

// At every dtype and level: trains a step, uses the scope, and expects that nothing has changed.
void expect_no_change(const std::function<void(Training&)>& use_scope) {
  for (const auto dtype : kDtypes) {
    for (const std::string level : kLevels) {
      SCOPED_TRACE(level + " " + dtype_name(dtype));
      Training run(options(level, dtype));
      run.train(0);
      const auto before = run.everything();
      use_scope(run);
      EXPECT_TRUE(same_bits(run.everything(), before));
      EXPECT_EQ(run.train(1), Step::stepped);
    }
  }
}

TEST(Fp32Weights, AreDiscardedWithoutAWrite) {
  expect_no_change([](Training& run) {
    std::vector<at::Tensor> tensors = run.mixed.master_params(*run.optimizer);
    for (const ModelEntry& entry : entries_of(Model(run.net))) tensors.push_back(entry.tensor);
    const auto versions = [&] {
      std::vector<std::int64_t> all;
      for (const at::Tensor& tensor : tensors) all.push_back(tensor._version());
      return all;
    };
    const auto earlier = versions();
    auto fp32 = run.mixed.fp32_weights(run.net);
    EXPECT_EQ(run.net->conv->weight.scalar_type(), torch::kFloat);
    fp32.discard();
    fp32.discard();
    EXPECT_EQ(versions(), earlier);
  });
}

TEST(Fp32Weights, AreTheExactMastersForTheTimeOfTheScope) {
  expect_no_change([](Training& run) {
    const auto masters = run.mixed.master_params(*run.optimizer);
    const auto fp32 = run.mixed.fp32_weights(run.net);
    for (const ModelEntry& entry : entries_of(Model(run.net))) {
      if (entry.tensor.is_floating_point()) {
        EXPECT_EQ(entry.tensor.scalar_type(), torch::kFloat) << entry.name;
      }
    }
    const auto inside = run.net->parameters();
    for (std::size_t i = 0; i < inside.size(); ++i) {
      EXPECT_TRUE(same_bits(inside[i], masters[i].to(torch::kFloat)));
    }
  });
}

TEST(Fp32Weights, ChangesMadeMeanwhileAreWhatTrainingGoesOnWith) {
  for (const std::string level : kLevels) {
    SCOPED_TRACE(level);
    Training run(options(level));
    {
      const auto fp32 = run.mixed.fp32_weights(run.net);
      const torch::NoGradGuard no_grad;
      run.net->conv->weight.fill_(0.1);                                      // in place
      run.net->head->bias.set_data(torch::full({3}, 0.2));                   // other memory
      run.net->norm->running_mean.set_data(torch::full({4}, 0.3F).clone());  // a buffer
    }
    const auto conv = run.net->conv->weight;
    EXPECT_TRUE(same_bits(conv, torch::full_like(conv, 0.1)));
    const auto masters = run.mixed.master_params(*run.optimizer);
    const auto master = level == "O3" ? torch::kBFloat16 : torch::kFloat;
    EXPECT_TRUE(same_bits(masters[0], torch::full_like(conv, 0.1, master)));
    EXPECT_TRUE(same_bits(masters.back(), torch::full({3}, 0.2, master)));
    const auto mean = run.net->norm->running_mean;
    EXPECT_EQ(mean.scalar_type(), level == "O3" ? torch::kBFloat16 : torch::kFloat);
    EXPECT_TRUE(same_bits(mean, torch::full_like(mean, 0.3)));
    EXPECT_EQ(run.train(0), Step::stepped);
    EXPECT_TRUE(same_bits(run.net->conv->weight,
                          run.mixed.master_params(*run.optimizer)[0].to(conv.scalar_type())));
  }
}

TEST(Fp32Weights, ForwardAndStepMeanwhileAreErrors) {
  Training run(options("O2"));
  run.train(0);
  const auto loss = run.mixed.forward(run.net, images()).sum();
  {
    const auto fp32 = run.mixed.fp32_weights(run.net);
    EXPECT_EQ(message_of<Error>([&] { run.mixed.forward(run.net, images()); }),
              "[amp.mixed_precision.forward] expected a call outside of fp32_weights(), got one "
              "while the weights are fp32 — end the scope of fp32_weights() first");
    EXPECT_THAT(
        message_of<Error>([&] { run.mixed.scale_loss(loss, *run.optimizer).backward(); }),
        HasSubstr("[amp.mixed_precision.scale_loss] expected a call outside of fp32_weights()"));
    EXPECT_THAT(message_of<Error>([&] { run.mixed.step(*run.optimizer); }),
                HasSubstr("[amp.mixed_precision.step] expected a call outside of fp32_weights()"));
  }
  EXPECT_EQ(run.train(1), Step::stepped);
}

TEST(Fp32Weights, AMisfitIsAnErrorThatNamesItAndKeepsIt) {
  Training run(options("O2"));
  const auto before = run.net->head->weight.clone();
  auto fp32 = run.mixed.fp32_weights(run.net);
  run.net->head->weight.set_data(torch::ones({7, 7}));
  run.net->conv->weight.set_data(torch::ones({4, 2, 3, 3}));
  EXPECT_EQ(message_of<Error>([&] { fp32.end(); }),
            "[amp.mixed_precision.fp32_weights] expected weights of the model's shapes, got [7, 7] "
            "for 'head.weight' of shape [3, 4] — the other weights were taken over");
  EXPECT_NO_THROW(fp32.end()) << "once";
  EXPECT_TRUE(same_bits(run.net->head->weight, before));
  EXPECT_TRUE(same_bits(run.net->conv->weight, torch::ones({4, 2, 3, 3}, torch::kBFloat16)));
  EXPECT_EQ(run.train(0), Step::stepped);
}

TEST(Fp32Weights, AMisfitAtTheEndOfTheScopeThrowsNothing) {
  Training run(options("O2"));
  {
    const auto fp32 = run.mixed.fp32_weights(run.net);
    run.net->head->weight.set_data(torch::ones({7, 7}));
  }
  EXPECT_EQ(run.net->head->weight.sizes(), (std::vector<std::int64_t>{3, 4}));
  EXPECT_EQ(run.train(0), Step::stepped);
}

TEST(Fp32Weights, CanBeMovedAndNested) {
  ToyConvNet first = make_net(1);
  ToyConvNet second = make_net(2);
  auto mixed = initialize({first, second}, {}, options("O3"));
  const auto before = first->conv->weight.clone();
  {
    auto outer = mixed.fp32_weights(first);
    const auto moved = std::move(outer);
    {
      const auto inner = mixed.fp32_weights(second);
      const auto again = mixed.fp32_weights(first);  // nothing left to do
      EXPECT_EQ(second->conv->weight.scalar_type(), torch::kFloat);
    }
    EXPECT_EQ(second->conv->weight.scalar_type(), torch::kBFloat16);
    EXPECT_EQ(first->conv->weight.scalar_type(), torch::kFloat);
    EXPECT_THROW(mixed.forward(second, images()), Error);
  }
  EXPECT_TRUE(same_bits(first->conv->weight, before));
  EXPECT_NO_THROW(mixed.forward(second, images()));
}

// set_data() would drop the node that accumulates a gradient where the dtype changes, and the hooks
// of data-parallel training with it.
TEST(Fp32Weights, KeepWhatHangsOnTheParameters) {
  Training run(options("O2"));
  int calls = 0;
  const auto accumulator = torch::autograd::impl::grad_accumulator(run.net->conv->weight);
  run.net->conv->weight.register_hook([&](const at::Tensor&) { ++calls; });
  {
    const auto fp32 = run.mixed.fp32_weights(run.net);
  }
  EXPECT_EQ(torch::autograd::impl::grad_accumulator(run.net->conv->weight), accumulator);
  run.train(0);
  EXPECT_EQ(calls, 1);
}

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    in = register_parameter("in", torch::arange(8.0F).view({2, 4}) / 7);
    out = register_parameter("out", in.variable_data());
  }
  at::Tensor forward(const at::Tensor& x) { return x.matmul(in.t()).matmul(out); }
  at::Tensor in;
  at::Tensor out;
};
TORCH_MODULE(Tied);

TEST(Fp32Weights, TensorsThatShareTheirMemoryGoOnSharingIt) {
  for (const bool masters : {false, true}) {
    Tied model;
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    auto mixed = initialize(model, optimizer, options("O3").master_weights(masters));
    {
      const auto fp32 = mixed.fp32_weights(model);
      EXPECT_EQ(model->in.const_data_ptr(), model->out.const_data_ptr());
      const torch::NoGradGuard no_grad;
      model->in.fill_(0.25);
    }
    EXPECT_EQ(model->in.const_data_ptr(), model->out.const_data_ptr());
    EXPECT_TRUE(same_bits(model->out, torch::full({2, 4}, 0.25, torch::kBFloat16)));
  }
}

// ------------------------------------------------------------------ model files

TEST(SaveModel, WritesFp32ThatPlainLibTorchReadsAtEveryLevel) {
  const TemporaryFolder folder;
  for (const auto dtype : kDtypes) {
    for (const std::string level : kLevels) {
      SCOPED_TRACE(level + " " + dtype_name(dtype));
      Training run(options(level, dtype));
      run.train(0);
      const auto before = run.everything();
      const std::string path = folder / "model.pt";
      run.mixed.save_model(run.net, path);
      EXPECT_TRUE(same_bits(run.everything(), before));
      ToyConvNet plain = make_net(99);
      torch::load(plain, path);
      const auto masters = run.mixed.master_params(*run.optimizer);
      for (std::size_t i = 0; i < masters.size(); ++i) {
        EXPECT_TRUE(same_bits(plain->parameters()[i], masters[i].to(torch::kFloat)));
      }
      EXPECT_TRUE(
          same_bits(plain->norm->running_var, run.net->norm->running_var.to(torch::kFloat)));
    }
  }
}

TEST(LoadModel, BringsModelAndMastersBackExactly) {
  const TemporaryFolder folder;
  const std::string path = folder / "model.pt";
  for (const auto dtype : kDtypes) {
    for (const std::string level : kLevels) {
      SCOPED_TRACE(level + " " + dtype_name(dtype));
      Training run(options(level, dtype));
      run.train(0);
      run.mixed.save_model(run.net, path);
      const auto want = run.everything();
      run.train(1);
      run.train(2);
      EXPECT_FALSE(same_bits(run.everything(), want));
      run.mixed.load_model(run.net, path);
      EXPECT_TRUE(same_bits(run.everything(), want));
      EXPECT_EQ(run.train(3), Step::stepped);
    }
  }
}

TEST(LoadModel, TakesFilesOfAnyFloatingDtype) {
  const TemporaryFolder folder;
  const std::string path = folder / "model.pt";
  for (const auto file_dtype : {torch::kHalf, torch::kBFloat16, torch::kFloat, torch::kDouble}) {
    ToyConvNet saved_net = make_net(7);
    saved_net->to(file_dtype);
    torch::save(saved_net, path);
    for (const std::string level : kLevels) {
      SCOPED_TRACE(level + " from " + dtype_name(file_dtype));
      Training run(options(level));
      run.mixed.load_model(run.net, path);
      const auto want = saved_net->conv->weight.to(torch::kFloat);
      const auto master = run.mixed.master_params(*run.optimizer)[0];
      EXPECT_TRUE(same_bits(master, want.to(master.scalar_type())));
      EXPECT_EQ(run.train(0), Step::stepped);
    }
  }
}

TEST(LoadModel, FilesThatDoNotFitAreErrorsThatChangeNothing) {
  const TemporaryFolder folder;
  Training run(options("O2"));
  run.train(0);
  const auto before = run.everything();
  const auto refused = [&](const std::string& path) {
    std::string message = message_of<FileError>([&] { run.mixed.load_model(run.net, path); });
    EXPECT_TRUE(same_bits(run.everything(), before));
    EXPECT_THAT(message, HasSubstr("[weights."));
    EXPECT_THAT(message, HasSubstr(path));
    return message;
  };
  refused(folder / "missing.pt");

  test::write_text(folder / "text.pt", "not a model");
  refused(folder / "text.pt");

  run.mixed.save_model(run.net, folder / "whole.pt");
  const std::string whole = test::read_text(folder / "whole.pt");
  test::write_text(folder / "half.pt", whole.substr(0, whole.size() / 2));
  refused(folder / "half.pt");

  torch::save(ToyConvNet(7), folder / "shape.pt");
  EXPECT_THAT(refused(folder / "shape.pt"), HasSubstr("expected 'head.weight' of shape [3, 4] in"));

  torch::save(torch::nn::Linear(4, 3), folder / "other.pt");
  EXPECT_THAT(refused(folder / "other.pt"), HasSubstr("got none for"));

  EXPECT_EQ(run.train(1), Step::stepped);
}

TEST(SaveModel, WhereNothingCanBeWrittenIsAnErrorAndTheModelStays) {
  const TemporaryFolder folder;
  Training run(options("O2"));
  const auto before = run.everything();
  EXPECT_THAT(
      message_of<FileError>([&] { run.mixed.save_model(run.net, folder / "no" / "model.pt"); }),
      HasSubstr("[amp.mixed_precision.save_model] expected to write '"));
  EXPECT_THROW(run.mixed.save_model(run.net, folder.path()), FileError);
  EXPECT_TRUE(same_bits(run.everything(), before));
}

TEST(SaveModel, UnknownModelsAreErrors) {
  const TemporaryFolder folder;
  Training run(options("O2"));
  const ToyConvNet stranger = make_net();
  EXPECT_THROW(run.mixed.save_model(stranger, folder / "model.pt"), Error);
  EXPECT_THROW(run.mixed.load_model(stranger, folder / "model.pt"), Error);
  EXPECT_FALSE(std::filesystem::exists(folder / "model.pt"));
}

TEST(SaveModel, TorchScriptModelsGoThroughTheirOwnFormat) {
  const TemporaryFolder folder;
  const std::string path = folder / "script.pt";
  torch::manual_seed(5);
  torch::jit::Module model("ToyConvNet");
  model.register_parameter("weight", torch::randn({3, 4}).requires_grad_(), false);
  model.register_buffer("offset", torch::randn({3}));
  model.define(
      "def forward(self, x: Tensor):\n  return torch.linear(x, self.weight, self.offset)\n");
  const auto exact = model.attr("weight").toTensor().detach().clone();
  torch::optim::SGD optimizer(std::vector<at::Tensor>{model.attr("weight").toTensor()}, 0.1);
  auto mixed = initialize(model, optimizer, options("O2"));
  mixed.save_model(model, path);
  EXPECT_TRUE(same_bits(torch::jit::load(path).attr("weight").toTensor(), exact));
  {
    const torch::NoGradGuard no_grad;
    model.attr("weight").toTensor().zero_();
  }
  mixed.load_model(model, path);
  EXPECT_TRUE(same_bits(mixed.master_params(optimizer)[0], exact));
  EXPECT_TRUE(same_bits(model.attr("weight").toTensor(), exact.to(torch::kBFloat16)));
  EXPECT_EQ(model.attr("offset").toTensor().scalar_type(), torch::kBFloat16);
}

// ------------------------------------------------------------------ training state

constexpr std::array<const char*, 3> kParts{"model", "optimizer", "mixed"};

class ResumeBitwise
    : public testing::TestWithParam<std::tuple<const char*, ScalarType, test::OptimizerKind>> {
 protected:
  Training make(std::uint64_t seed) const {
    const auto& [level, dtype, kind] = GetParam();
    Options given = options(level, dtype);
    given.loss_scale("dynamic").loss_scale_options(
        LossScaleOptions().init_scale(256).growth_interval(2).hysteresis(2));
    return Training(given, seed, kind.make);
  }
};

// After saving in the middle and loading into a new or a used run, in any order, training continues
// bit for bit: weights, masters, buffers, the optimizer's state, the scale and its counters.
TEST_P(ResumeBitwise, WhateverTheOrderOfLoading) {
  const TemporaryFolder folder;
  const std::string model_path = folder / "model.pt";
  const auto overflows = [](int step) { return step == 1 || step == 4; };
  Training whole = make(5);
  for (int step = 0; step < 3; ++step) whole.train(step, overflows(step));
  whole.mixed.save_model(whole.net, model_path);
  const auto optimizer_state = [&](torch::serialize::OutputArchive& archive) {
    whole.optimizer->save(archive);
  };
  std::vector<torch::serialize::InputArchive> optimizer_archives;
  std::vector<torch::serialize::InputArchive> mixed_archives;
  for (int i = 0; i < 18; ++i) {
    optimizer_archives.push_back(archived(optimizer_state));
    mixed_archives.push_back(saved(whole.mixed));
  }
  for (int step = 3; step < 7; ++step) whole.train(step, overflows(step));
  const auto want = whole.everything();

  std::size_t round = 0;
  for (const std::string into : {"fresh", "used", "fresh, by torch::load"}) {
    std::array<std::size_t, 3> order{0, 1, 2};
    do {
      SCOPED_TRACE(into + ", " + kParts[order[0]] + " first, then " + kParts[order[1]]);
      Training resumed = make(77);
      if (into == "used") resumed.train(9);
      for (const std::size_t part : order) {
        if (part == 0 && into == "fresh, by torch::load") {
          torch::load(resumed.net, model_path);
        } else if (part == 0) {
          resumed.mixed.load_model(resumed.net, model_path);
        }
        if (part == 1) resumed.optimizer->load(optimizer_archives[round]);
        if (part == 2) resumed.mixed.load(mixed_archives[round]);
      }
      ++round;
      for (int step = 3; step < 7; ++step) resumed.train(step, overflows(step));
      EXPECT_TRUE(same_bits(resumed.everything(), want));
      EXPECT_EQ(resumed.mixed.loss_scaler().state(), whole.mixed.loss_scaler().state());
      EXPECT_EQ(resumed.mixed.skipped_steps(), whole.mixed.skipped_steps());
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

// Each of LibTorch's optimizers goes through this in master_weights_test.cpp.
std::vector<test::OptimizerKind> optimizers_with_state() {
  std::vector<test::OptimizerKind> some = test::all_optimizers();
  std::erase_if(
      some, [](const auto& kind) { return kind.name != "AdamW" && kind.name != "SGDMomentum"; });
  return some;
}

INSTANTIATE_TEST_SUITE_P(All, ResumeBitwise,
                         testing::Combine(testing::ValuesIn(kLevels),
                                          testing::Values(torch::kBFloat16, torch::kHalf),
                                          testing::ValuesIn(optimizers_with_state())),
                         [](const auto& tested) {
                           return std::string(std::get<0>(tested.param)) +
                                  (std::get<1>(tested.param) == torch::kHalf ? "Fp16" : "Bf16") +
                                  std::get<2>(tested.param).name;
                         });

TEST(MixedPrecisionState, EveryLossHasItsScaler) {
  const Options given = options("O2", torch::kHalf)
                            .num_losses(2)
                            .loss_scale("dynamic")
                            .loss_scale_options(LossScaleOptions().init_scale(256));
  Training run(given);
  auto loss = run.mixed.scale_loss(run.mixed.forward(run.net, images()).pow(2).mean(),
                                   *run.optimizer, ScaleLossOptions().loss_id(1));
  loss.value().backward();
  run.net->head->bias.mutable_grad()[0] = std::numeric_limits<float>::quiet_NaN();
  loss.finish();
  EXPECT_EQ(run.mixed.step(*run.optimizer), Step::skipped);
  Training resumed(given);
  auto state = saved(run.mixed);
  resumed.mixed.load(state);
  EXPECT_EQ(resumed.mixed.loss_scaler(0).scale(), 256);
  EXPECT_EQ(resumed.mixed.loss_scaler(1).scale(), 128);
  EXPECT_EQ(resumed.mixed.loss_scaler(1).skipped_steps(), 1);
  EXPECT_EQ(resumed.mixed.skipped_steps(), 1);
}

TEST(MixedPrecisionState, CannotBeSavedInTheMiddleOfAnIteration) {
  for (const bool delayed : {false, true}) {
    Training run(options("O2"));
    run.mixed
        .scale_loss(run.mixed.forward(run.net, images()).sum(), *run.optimizer,
                    ScaleLossOptions().delay_unscale(delayed))
        .backward();
    EXPECT_EQ(
        message_of<Error>([&] { saved(run.mixed); }),
        "[amp.mixed_precision.save] expected a call between two iterations, got one between "
        "scale_loss and step — save after step(), or drop the gradients with zero_grad() before");
    run.mixed.zero_grad(*run.optimizer);
    EXPECT_NO_THROW(saved(run.mixed));
  }
}

TEST(MixedPrecisionState, LoadingDropsGradientsAndWhatWasFoundInThem) {
  Training run(options("O2", torch::kHalf).loss_scale(128));
  auto state = saved(run.mixed);
  auto loss = run.mixed.scale_loss(run.mixed.forward(run.net, images()).sum(), *run.optimizer);
  loss.value().backward();
  run.net->head->bias.mutable_grad()[0] = std::numeric_limits<float>::infinity();
  loss.finish();
  run.mixed.load(state);
  for (const at::Tensor& p : run.mixed.master_params(*run.optimizer)) {
    EXPECT_FALSE(p.grad().defined());
  }
  for (const at::Tensor& p : run.net->parameters()) EXPECT_FALSE(p.grad().defined());
  EXPECT_EQ(run.train(0), Step::stepped);
}

TEST(MixedPrecisionState, AnotherRunsStateIsAnErrorThatChangesNothing) {
  const Options given = options("O2", torch::kHalf)
                            .loss_scale("dynamic")
                            .loss_scale_options(LossScaleOptions().init_scale(256));
  Training run(given);
  run.train(0);
  const auto before = run.everything();
  const detail::LossScaleState scale = run.mixed.loss_scaler().state();
  const auto refused = [&](torch::serialize::InputArchive archive) {
    std::string message = message_of<FileError>([&] { run.mixed.load(archive); });
    EXPECT_TRUE(same_bits(run.everything(), before));
    EXPECT_EQ(run.mixed.loss_scaler().state(), scale);
    EXPECT_THAT(message, HasSubstr("[amp."));
    return message;
  };
  const auto state_of = [](const Options& other) {
    Training another(other, 8);
    another.train(0);
    return saved(another.mixed);
  };
  EXPECT_EQ(refused(state_of(options("O1", torch::kHalf).loss_scale(128))),
            "[amp.mixed_precision.load] expected opt level O2, got O1 — call initialize with the "
            "options of the saved run");
  EXPECT_THAT(refused(state_of(options("O2", torch::kBFloat16))),
              HasSubstr("expected dtype float16, got bfloat16"));
  EXPECT_THAT(refused(state_of(Options(given).num_losses(2))),
              HasSubstr("expected number of losses 1, got 2"));
  EXPECT_THAT(refused(state_of(Options(given).master_weights(false))),
              HasSubstr("expected 'masters0' in the archive, got none"));
  {
    ToyConvNet other = make_net();
    auto models_only = initialize(other, given);
    EXPECT_THAT(refused(saved(models_only)), HasSubstr("expected number of optimizers 1, got 0"));
  }
  {
    ToyConvNet first = make_net();
    ToyConvNet second = make_net();
    auto optimizer = sgd(first->parameters());
    auto two = initialize({first, second}, {*optimizer}, given);
    EXPECT_THAT(refused(saved(two)), HasSubstr("expected number of models 1, got 2"));
  }
  {
    ToyConvNet wide(7);
    auto optimizer = sgd(wide->parameters());
    auto mixed = initialize(wide, *optimizer, given);
    EXPECT_THAT(refused(saved(mixed)), HasSubstr("expected a master weight of shape [3, 4]"));
  }
  refused(archived([](torch::serialize::OutputArchive&) {}));
  refused(archived([](torch::serialize::OutputArchive& archive) {
    archive.write("opt_level", c10::IValue(std::int64_t{2}));
  }));
  EXPECT_EQ(run.train(1), Step::stepped);
}

// LibTorch's state has the dtype of the weights that it was made for, and load() keeps it. In bf16 a
// mean of squares no longer moves with a beta2 of 0.999.
TEST(Masters, WidenTheStateOfATrainingIn16Bits) {
  for (const auto& kind : test::all_optimizers()) {
    for (const bool loads_before : {false, true}) {
      SCOPED_TRACE(kind.name + (loads_before ? ", before" : ", after"));
      ToyConvNet low = make_net();
      const auto low_optimizer = kind.make(low->parameters());
      auto narrow = initialize(low, *low_optimizer, options("O3"));
      narrow.scale_loss(narrow.forward(low, images()).sum(), *low_optimizer).backward();
      narrow.step(*low_optimizer);
      std::stringstream file;
      torch::save(*low_optimizer, file);

      ToyConvNet net = make_net();
      const auto optimizer = kind.make(net->parameters());
      if (loads_before) torch::load(*optimizer, file);
      auto mixed = initialize(net, *optimizer, options("O2"));
      if (!loads_before) torch::load(*optimizer, file);
      mixed.scale_loss(mixed.forward(net, images()).sum(), *optimizer).backward();
      mixed.step(*optimizer);
      for (const auto& [key, state] : optimizer->state()) {
        auto archive = archived(
            [kept = state.get()](torch::serialize::OutputArchive& out) { kept->serialize(out); });
        for (const std::string& name : archive.keys()) {
          c10::IValue value;
          archive.read(name, value);
          if (!value.isTensor()) continue;
          EXPECT_EQ(value.toTensor().scalar_type(), torch::kFloat) << name;
        }
      }
    }
  }
}

}  // namespace
}  // namespace semitone::amp::mixed_precision_io_test
