// MixedPrecision::forward: arguments, results, modules and operators of every kind.

#include "semitone/amp/initialize.h"
#include "semitone/core/dtype.h"
#include "tests/amp/mixed_precision_fixture.h"
#include "tests/support/errors.h"
#include "tests/support/levels.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"
#include "tests/support/toy_nets.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace semitone::amp::mixed_precision_test {
namespace {

using c10::ScalarType;
using test::kDtypes;
using test::kLevels;
using test::near;
using test::pointwise_tolerance;
using test::reduction_tolerance;
using test::same_bits;

struct ContainersImpl : torch::nn::Module {
  ContainersImpl() { register_module("linear", linear); }
  using Result = std::tuple<at::Tensor, std::vector<at::Tensor>, std::optional<at::Tensor>, int>;
  Result forward(const std::tuple<at::Tensor, at::Tensor>& pair,
                 const std::vector<at::Tensor>& list, const std::optional<at::Tensor>& maybe,
                 int factor) {
    seen = {std::get<0>(pair).scalar_type(), std::get<1>(pair).scalar_type(),
            list.at(0).scalar_type(), list.at(1).scalar_type()};
    const auto y = linear(std::get<0>(pair)) * factor;
    return {y,
            {y + 1, list.at(1)},
            maybe.has_value() ? std::optional(linear(*maybe)) : std::nullopt,
            factor};
  }
  torch::nn::Linear linear{3, 3};
  std::vector<ScalarType> seen;
};
TORCH_MODULE(Containers);

TEST(MixedPrecision, ForwardCastsWhateverHoldsTensors) {
  Containers model;
  auto mixed = initialize(model, quiet("O3"));
  const auto x = torch::randn({2, 3});
  const auto ids = torch::ones({2}, torch::kLong);
  const auto wide = torch::ones({2}, torch::kDouble);
  for (const auto& maybe : {std::optional<at::Tensor>(x), std::optional<at::Tensor>()}) {
    const auto [y, list, other, factor] =
        mixed.forward(model, std::tuple(x, ids), std::vector{x, wide}, maybe, 2);
    EXPECT_EQ(model->seen,
              (std::vector{torch::kBFloat16, torch::kLong, torch::kBFloat16, torch::kDouble}));
    EXPECT_EQ(y.scalar_type(), torch::kFloat);
    EXPECT_EQ(list.at(0).scalar_type(), torch::kFloat);
    EXPECT_EQ(list.at(1).scalar_type(), torch::kDouble);
    EXPECT_EQ(other.has_value(), maybe.has_value());
    EXPECT_EQ(other.value_or(x).scalar_type(), torch::kFloat);
    EXPECT_EQ(factor, 2);
  }
}

struct Losses {
  at::Tensor reconstruction;
  at::Tensor divergence;
};
struct Encoded {
  at::Tensor mean;
  Losses losses;
  std::vector<at::Tensor> layers;
  std::int64_t steps = 0;
};
struct Images {
  at::Tensor data;
  std::string name;
};
struct EncoderImpl : torch::nn::Module {
  EncoderImpl() { register_module("linear", linear); }
  Encoded forward(const Images& images) {
    seen = images.data.scalar_type();
    const auto y = linear(images.data);
    return {.mean = y, .losses = {y * 2, y * 3}, .layers = {y, y + 1}, .steps = 7};
  }
  torch::nn::Linear linear{3, 3};
  ScalarType seen = ScalarType::Undefined;
};
TORCH_MODULE(Encoder);

TEST(MixedPrecision, ForwardLooksIntoStructs) {
  const Images input{torch::randn({2, 3}), "digits"};
  for (const auto dtype : kDtypes) {
    for (const std::string level : {"O1", "O2", "O3"}) {
      SCOPED_TRACE(level + " " + dtype_name(dtype));
      Encoder model;
      auto mixed = initialize(model, quiet(Options(level).dtype(dtype)));
      const Encoded result = mixed.forward(model, input);
      EXPECT_EQ(model->seen, level == "O1" ? torch::kFloat : dtype);
      for (const at::Tensor& tensor :
           {result.mean, result.losses.reconstruction, result.losses.divergence,
            result.layers.at(0), result.layers.at(1)})
        EXPECT_EQ(tensor.scalar_type(), torch::kFloat);
      EXPECT_EQ(result.steps, 7);
      EXPECT_TRUE(near(result.losses.reconstruction, result.mean * 2, pointwise_tolerance(dtype)));
      EXPECT_EQ(input.data.scalar_type(), torch::kFloat);
    }
  }
}

TEST(MixedPrecision, ForwardTakesAnyModules) {
  for (const std::string level : kLevels) {
    torch::manual_seed(5);
    torch::nn::AnyModule model(torch::nn::Linear(4, 2));
    torch::optim::SGD optimizer(model.ptr()->parameters(), 0.1);
    auto mixed = initialize(model, optimizer, quiet(level));
    const auto weight = model.ptr()->parameters()[0].detach().to(torch::kFloat).clone();
    EXPECT_EQ(train_once(mixed, model, optimizer, torch::randn({3, 4})), Step::stepped);
    EXPECT_FALSE(near(model.ptr()->parameters()[0].detach(), weight, 1e-4)) << level;
  }
}

// Without the error its operators would run without casts.
TEST(MixedPrecision, AModelOnAnotherDeviceIsAnError) {
  const auto build = [](const Options& options) {
    return [options] { (void)initialize(make_net(), quiet(options)); };
  };
  for (const char* level : {"O1", "O2", "O3"}) {
    test::expect_error(build(Options(level).device(torch::kCUDA).dtype(torch::kHalf)),
                       {"[amp.initialize]", "'conv.weight' on cpu", "Options::device"});
  }
  EXPECT_NO_THROW(build(Options("O0").device(torch::kCUDA))());
  struct Elsewhere : torch::nn::Module {
    Elsewhere() { register_parameter("weight", torch::empty({2, 2}, torch::kMeta)); }
  };
  ToyConvNet net = make_net();
  const auto elsewhere = std::make_shared<Elsewhere>();
  test::expect_error([&] { (void)initialize({net, elsewhere}, {}, quiet(Options("O1"))); },
                     {"[amp.initialize]", "'weight' on meta"});
}

// An embedding that stays on another device does not decide the device of the model.
TEST(MixedPrecision, TheDeviceIsThatOfMostElements) {
  struct Mixed : torch::nn::Module {
    Mixed() {
      register_parameter("first", torch::empty({2, 2}, torch::kMeta));
      register_module("rest", rest);
    }
    torch::nn::Linear rest{8, 8};
  };
  Mixed model;
  EXPECT_EQ(initialize(model, quiet(Options("O1"))).properties().device, torch::kCPU);
}

// The policy is what its preset and its edits say for the model's device.
TEST(MixedPrecision, APolicyForAnotherDeviceTakesTheRowsOfTheModels) {
  struct Volumes : torch::nn::Module {
    Volumes() { register_module("conv", conv); }
    at::Tensor forward(const at::Tensor& x) { return torch::avg_pool3d(conv(x), 2); }
    torch::nn::Conv3d conv{torch::nn::Conv3dOptions(1, 2, 3)};
  };
  const auto model = std::make_shared<Volumes>();
  const auto policy = CastPolicy::semitone({torch::kCUDA, torch::kHalf}).lower("softmax");
  auto mixed = initialize(model, quiet(Options("O1").policy(policy).dtype(torch::kBFloat16)));
  const auto x = torch::randn({1, 1, 6, 6, 6});
  EXPECT_TRUE(
      near(mixed.forward(model, x), model->forward(x), reduction_tolerance(torch::kBFloat16, 27)));
}

// run(level, dtype) trains a step and returns tensors, which must be those of O0.
template <typename Run>
void expect_results_of_o0(const Run& run, std::initializer_list<const char*> levels) {
  const std::vector<torch::Tensor> want = run("O0", torch::kBFloat16);
  for (const auto dtype : kDtypes) {
    for (const char* level : levels) {
      SCOPED_TRACE(level + (" " + dtype_name(dtype)));
      const std::vector<torch::Tensor> got = run(level, dtype);
      for (std::size_t i = 0; i < want.size(); ++i) {
        const double error = ((got[i] - want[i]).norm() / want[i].norm()).item<double>();
        EXPECT_LT(error, dtype == torch::kHalf ? 5e-3 : 4e-2) << "result " << i;
      }
    }
  }
}

// Tensors that forward itself creates are fp32, while the weights are not.
TEST(MixedPrecision, ForwardMayMakeFp32TensorsOfItsOwnAtO2) {
  struct Maker : torch::nn::Module {
    Maker() {
      register_module("conv", conv);
      register_module("line", line);
      register_module("volume", volume);
      register_module("lstm", lstm);
      register_module("gru", gru);
      register_module("cell", cell);
    }
    std::vector<at::Tensor> forward(const at::Tensor& x) {
      const auto grid =
          torch::nn::functional::affine_grid(torch::eye(2, 3).unsqueeze(0), {1, 2, 6, 6}, false);
      const auto image = torch::grid_sampler(conv(x), grid, 0, 0, false);
      const auto state = torch::zeros({1, 1, 6});
      const auto sequence = image.mean(1).transpose(0, 1);
      const auto [out, hidden] = lstm(sequence, std::tuple(state, state));
      const auto h = std::get<0>(gru(out, state));
      const auto c = std::get<0>(cell(h[0], std::tuple(state[0], state[0])));
      const auto index = torch::zeros({1, 6}, torch::kLong);
      return {image,
              h,
              c,
              line(torch::ones({1, 2, 6})),
              volume(torch::ones({1, 2, 4, 4, 4})),
              torch::dot(c[0], torch::ones({6})),
              torch::scatter_add(torch::zeros({1, 6}), 0, index, c),
              torch::bilinear(c, torch::ones({1, 6}), torch::ones({2, 6, 6}), {})};
    }
    torch::nn::Conv2d conv{torch::nn::Conv2dOptions(2, 2, 3).padding(1)};
    torch::nn::Conv1d line{torch::nn::Conv1dOptions(2, 2, 3)};
    torch::nn::Conv3d volume{torch::nn::Conv3dOptions(2, 2, 3)};
    torch::nn::LSTM lstm{torch::nn::LSTMOptions(6, 6)};
    torch::nn::GRU gru{torch::nn::GRUOptions(6, 6)};
    torch::nn::LSTMCell cell{torch::nn::LSTMCellOptions(6, 6)};
  };
  const auto run = [](const std::string& level, ScalarType dtype) {
    torch::manual_seed(5);
    const auto model = std::make_shared<Maker>();
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    auto mixed = initialize(model, optimizer, quiet(Options(level).dtype(dtype).loss_scale(8)));
    torch::manual_seed(6);
    auto results = mixed.forward(model, torch::randn({1, 2, 6, 6}));
    at::Tensor loss = torch::zeros({});
    for (const at::Tensor& result : results) loss = loss + result.pow(2).sum();
    mixed.scale_loss(loss, optimizer).backward();
    EXPECT_EQ(mixed.step(optimizer), Step::stepped);
    return results;
  };
  expect_results_of_o0(run, {"O1", "O2"});
}

// Without Semitone's kernels LibTorch refuses fp32 with 16-bit weights in all of these layers.
TEST(MixedPrecision, NormalisationLayersTakeFp32WhateverTheirWeightsAre) {
  struct Norms : torch::nn::Module {
    Norms() {
      register_module("group", group);
      register_module("instance", instance);
      register_module("layer", layer);
      register_module("batch", batch);
      register_module("prelu", prelu);
    }
    std::vector<at::Tensor> forward(const at::Tensor& x) {
      const at::Tensor wide = x.to(torch::kFloat) + 1;
      return {group(wide), instance(wide), layer(wide), batch(wide), prelu(wide)};
    }
    torch::nn::GroupNorm group{torch::nn::GroupNormOptions(2, 4)};
    torch::nn::InstanceNorm2d instance{torch::nn::InstanceNorm2dOptions(4).affine(true)};
    torch::nn::LayerNorm layer{torch::nn::LayerNormOptions({6})};
    torch::nn::BatchNorm2d batch{4};
    torch::nn::PReLU prelu;
  };
  for (const bool fast : {true, false}) {
    SCOPED_TRACE(fast ? "Semitone's kernels" : "LibTorch's kernels");
    const auto run = [fast](const std::string& level, ScalarType dtype) {
      torch::manual_seed(5);
      const auto model = std::make_shared<Norms>();
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      auto options = Options(level).dtype(dtype).loss_scale(8);
      if (!fast && level != "O0") options.policy(CastPolicy::semitone().fast_kernels(false));
      auto mixed = initialize(model, optimizer, quiet(options));
      auto results = mixed.forward(model, torch::randn({3, 4, 6, 6}));
      at::Tensor loss = torch::zeros({});
      for (const at::Tensor& result : results) loss = loss + result.pow(2).sum();
      mixed.scale_loss(loss, optimizer).backward();
      EXPECT_EQ(mixed.step(optimizer), Step::stepped);
      return results;
    };
    expect_results_of_o0(run, {"O1", "O2", "O3"});
  }
}

// LibTorch's CPU kernels know fp32 and fp64 only, or are wrong in 16 bits.
TEST(MixedPrecision, OperatorsWithout16BitKernelsComputeInFp32AtO2) {
  struct Maker : torch::nn::Module {
    Maker() { register_module("linear", linear); }
    std::vector<at::Tensor> forward(const at::Tensor& x) {
      const at::Tensor h = linear(x);
      const at::Tensor square = h.t().mm(h) / 8 + torch::eye(6, h.options());
      const at::Tensor pairs = torch::view_as_complex(h.view({8, 3, 2}));
      return {torch::fft_rfft(h).abs(),
              torch::cdist(h, h + 1),
              torch::linalg_solve(square, h.t()),
              torch::linalg_svdvals(square),
              torch::matrix_exp(square * 0.1),
              torch::trace(square),
              torch::quantile(h, 0.25, 0),
              torch::view_as_real(pairs * pairs),
              torch::ctc_loss(h.view({4, 2, 6}).log_softmax(2), torch::ones({2, 2}, torch::kLong),
                              torch::full({2}, 4, torch::kLong), torch::full({2}, 1, torch::kLong)),
              torch::nn::functional::avg_pool3d(h.view({1, 2, 2, 2, 6}),
                                                torch::nn::functional::AvgPool3dFuncOptions(2))};
    }
    torch::nn::Linear linear{6, 6};
  };
  const auto run = [](const std::string& level, ScalarType dtype) {
    torch::manual_seed(5);
    const auto model = std::make_shared<Maker>();
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    auto mixed = initialize(model, optimizer, quiet(Options(level).dtype(dtype).loss_scale(8)));
    torch::manual_seed(6);
    auto results = mixed.forward(model, torch::randn({8, 6}));
    at::Tensor loss = torch::zeros({});
    for (const at::Tensor& result : results) loss = loss + result.pow(2).mean();
    mixed.scale_loss(loss, optimizer).backward();
    results.push_back(mixed.master_params(optimizer)[0].grad().clone());
    EXPECT_EQ(mixed.step(optimizer), Step::stepped);
    return results;
  };
  expect_results_of_o0(run, {"O2", "O3"});
}

// A graph's neighbourhoods, as graph networks multiply by them.
TEST(MixedPrecision, SparseMatricesMayStandInProductsAtEveryLevel) {
  struct Graph : torch::nn::Module {
    Graph() { register_module("linear", linear); }
    at::Tensor forward(const at::Tensor& x, const at::Tensor& neighbours) {
      return torch::mm(neighbours, linear(torch::mm(neighbours, x)));
    }
    torch::nn::Linear linear{6, 4};
  };
  torch::manual_seed(7);
  const at::Tensor x = torch::randn({5, 6});
  const at::Tensor dense = torch::rand({5, 5}).gt(0.5).to(torch::kFloat);
  for (const bool rows : {false, true}) {
    const at::Tensor sparse = rows ? dense.to_sparse_csr() : dense.to_sparse();
    for (const std::string level : kLevels) {
      for (const auto dtype : kDtypes) {
        SCOPED_TRACE(level + " " + dtype_name(dtype) + (rows ? " csr" : " coo"));
        torch::manual_seed(8);
        const auto model = std::make_shared<Graph>();
        const at::Tensor want = model->forward(x, dense).detach();
        const at::Tensor loss = model->forward(x, dense).pow(2).sum();
        loss.backward();
        const at::Tensor gradient = model->linear->weight.grad().clone();
        model->zero_grad();
        torch::optim::SGD optimizer(model->parameters(), 0.1);
        auto mixed =
            initialize(model, optimizer, quiet(Options(level).dtype(dtype).loss_scale(1.0)));
        const at::Tensor got = mixed.forward(model, x, sparse);
        const double tolerance = dtype == torch::kHalf ? 5e-3 : 4e-2;
        EXPECT_LT(((got - want).norm() / want.norm()).item<double>(), tolerance);
        mixed.scale_loss(got.pow(2).sum(), optimizer).backward();
        const at::Tensor seen = mixed.master_params(optimizer)[0].grad().to(torch::kFloat);
        EXPECT_LT(((seen - gradient).norm() / gradient.norm()).item<double>(), tolerance);
        EXPECT_EQ(mixed.step(optimizer), Step::stepped);
      }
    }
  }
}

TEST(MixedPrecision, ForwardTakesModulesHoweverTheyAreHeld) {
  for (const std::string level : kLevels) {
    SCOPED_TRACE(level);
    torch::manual_seed(6);
    auto pointer = std::make_shared<test::ToyConvNetImpl>();
    ToyConvNet holder(pointer);
    torch::manual_seed(6);
    test::ToyConvNetImpl reference;
    const at::Tensor expected = reference.forward(images());
    auto mixed = initialize({pointer, reference}, {}, quiet(level));
    // Of the batch, in training: the same each time.
    const at::Tensor output = mixed.forward(pointer, images());
    EXPECT_TRUE(
        near(output, expected, level == "O0" ? 0 : test::rounding_tolerance(torch::kBFloat16, 6)));
    EXPECT_TRUE(same_bits(mixed.forward(*pointer, images()), output));
    EXPECT_TRUE(same_bits(mixed.forward(holder, images()), output));
    EXPECT_TRUE(same_bits(mixed.forward(reference, images()), output));
  }
}

TEST(MixedPrecision, SequentialModels) {
  torch::nn::Sequential model(torch::nn::Linear(4, 8), torch::nn::BatchNorm1d(8),
                              torch::nn::Functional(torch::relu), torch::nn::Linear(8, 2));
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  auto mixed = initialize(model, optimizer, quiet("O2"));
  EXPECT_EQ(train_once(mixed, model, optimizer, torch::randn({6, 4})), Step::stepped);
}

TEST(MixedPrecision, EmbeddingsTakeIntegersAtEveryLevel) {
  for (const auto dtype : kDtypes) {
    for (const std::string level : kLevels) {
      torch::manual_seed(5);
      torch::nn::Sequential model(torch::nn::Embedding(10, 4), torch::nn::Linear(4, 2));
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      auto mixed = initialize(model, optimizer, quiet(Options(level).dtype(dtype).loss_scale(128)));
      EXPECT_EQ(train_once(mixed, model, optimizer, torch::tensor({1, 2, 9})), Step::stepped);
    }
  }
}

TEST(MixedPrecision, SparseEmbeddingsTrainAsInFp32) {
  const auto ids = torch::tensor({1, 4, 1});
  const auto train = [&](const std::string& level, ScalarType dtype) {
    torch::nn::Embedding model(torch::nn::EmbeddingOptions(6, 2).sparse(true));
    {
      const torch::NoGradGuard no_grad;
      model->weight.copy_(torch::arange(12).view({6, 2}) / 4.0);
    }
    torch::optim::SGD optimizer(model->parameters(), 0.125);
    auto mixed = initialize(model, optimizer, quiet(Options(level).dtype(dtype).loss_scale(8)));
    for (int i = 0; i < 2; ++i) {
      optimizer.zero_grad();
      for (int k = 0; k < 2; ++k) {
        mixed.scale_loss(mixed.forward(model, ids).pow(2).sum(), optimizer).backward();
      }
      EXPECT_EQ(mixed.step(optimizer), Step::stepped);
    }
    return model->weight.to(torch::kFloat);
  };
  const auto expected = train("O0", torch::kHalf);
  for (const auto dtype : kDtypes) {
    for (const std::string level : {"O1", "O2", "O3"}) {
      EXPECT_TRUE(near(train(level, dtype), expected, pointwise_tolerance(dtype))) << level;
    }
  }
}

}  // namespace
}  // namespace semitone::amp::mixed_precision_test
