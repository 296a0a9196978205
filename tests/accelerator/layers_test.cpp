#include "semitone/nn.h"
#include "semitone/parallel/sync_batch_norm.h"
#include "src/core/capture_scope.h"
#include "src/nn/batch_norm_mark.h"
#include "tests/support/accelerator/accelerator.h"
#include "tests/support/errors.h"
#include "tests/support/levels.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/nn.h>
#include <torch/types.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

// The layers of semitone::nn on a device without kernels of Semitone.
namespace semitone::test::accelerator {
namespace {

using Layer = std::function<at::Tensor(const at::Tensor& input)>;

// A layer's output, and the gradients of its input and of its parameters, on the CPU.
std::vector<at::Tensor> results(const Layer& layer, const at::Tensor& input,
                                const std::vector<at::Tensor>& parameters) {
  const at::Tensor leaf = input.detach().requires_grad_();
  const at::Tensor output = layer(leaf);
  // A sum of squares would not depend on the input of a layer that normalises.
  const at::Tensor factors = torch::arange(output.numel()).to(at::kFloat).sin();
  (output.to(at::kFloat) * factors.view(output.sizes()).to(output.device())).sum().backward();
  std::vector<at::Tensor> all{output.detach().cpu(), leaf.grad().cpu()};
  for (const at::Tensor& parameter : parameters) all.push_back(parameter.grad().cpu());
  return all;
}

struct AcceleratorLayers : AcceleratorTest {
  // Makes a layer twice, once for each device, and compares.
  template <typename Make>
  static void compare(const Make& make, const std::vector<std::int64_t>& shape,
                      c10::ScalarType dtype = at::kFloat) {
    torch::manual_seed(11);
    auto here = make();
    torch::manual_seed(11);
    auto there = make();
    move(*there, device());
    const at::Tensor input = torch::randn(shape).to(dtype);
    const auto run = [](auto& layer) {
      return [&layer](const at::Tensor& x) { return layer->forward(x); };
    };
    const auto want = results(run(here), input, here->parameters());
    const auto before = host_reads();
    const at::Tensor moved = input.to(device());
    const auto got = results(run(there), moved, there->parameters());
    EXPECT_EQ(host_reads() - before, std::ssize(got)) << "what this test reads";
    const double tolerance = reduction_tolerance(dtype, 512);
    EXPECT_TRUE(near(got, want, is_16_bits(dtype) ? 2 * tolerance : 4 * tolerance));
    const auto buffers = there->buffers(), wanted = here->buffers();
    for (std::size_t i = 0; i < wanted.size(); ++i)
      EXPECT_TRUE(near(buffers[i].cpu(), wanted[i], reduction_tolerance(at::kFloat, 512)));
  }

  static void compare_functions(const Layer& layer, const std::vector<std::int64_t>& shape) {
    torch::manual_seed(11);
    const at::Tensor input = torch::randn(shape);
    const auto want = results(layer, input, {});
    EXPECT_TRUE(near(results(layer, input.to(device()), {}), want,
                     4 * reduction_tolerance(at::kFloat, 512)));
  }
};

TEST_F(AcceleratorLayers, LayerNorm) {
  compare([] { return nn::FusedLayerNorm(nn::FusedLayerNormOptions({24})); }, {6, 5, 24});
  for (const auto dtype : kDtypes)
    compare([] { return nn::FusedLayerNorm(nn::FusedLayerNormOptions({24})); }, {6, 5, 24}, dtype);
}

TEST_F(AcceleratorLayers, RMSNorm) {
  const std::vector<std::int64_t> width{24};
  compare([&] { return nn::FusedRMSNorm(nn::FusedRMSNormOptions(width)); }, {6, 5, 24});
  for (const auto dtype : kDtypes)
    compare([&] { return nn::FusedRMSNorm(nn::FusedRMSNormOptions(width)); }, {6, 5, 24}, dtype);
}

TEST_F(AcceleratorLayers, DenseLayers) {
  compare([] { return nn::FusedDense(7, 5); }, {6, 7});
  compare([] { return nn::FusedDenseGeluDense(7, 9, 5); }, {6, 7});
  const std::vector<std::int64_t> sizes{7, 9, 5};
  for (const std::string activation : {"none", "relu", "sigmoid"})
    compare([&] { return nn::MLP(nn::MLPOptions(sizes).activation(activation)); }, {6, 7});
}

TEST_F(AcceleratorLayers, Gelu) {
  for (const std::string approximate : {"none", "tanh"}) {
    compare_functions([&](const at::Tensor& x) { return nn::fused_gelu(x, approximate); }, {6, 7});
    compare_functions(
        [&](const at::Tensor& x) {
          return nn::fused_bias_gelu(x, torch::full({7}, 0.5, x.options()), approximate);
        },
        {6, 7});
  }
}

TEST_F(AcceleratorLayers, CrossEntropy) {
  const auto target = torch::arange(6).remainder(5).index_fill(0, torch::tensor({2}), -100);
  for (const double smoothing : {0.0, 0.1}) {
    for (const bool weighted : {false, true}) {
      const auto loss = [&](const at::Tensor& x) {
        auto options = nn::FusedCrossEntropyOptions().label_smoothing(smoothing);
        if (weighted) options.weight(torch::linspace(0.5, 2, 5).to(x.device()));
        return nn::fused_cross_entropy(x, target.to(x.device()), options);
      };
      compare_functions(loss, {6, 5});
    }
  }
}

TEST_F(AcceleratorLayers, BatchNorm) {
  for (const bool relu : {false, true}) {
    compare([&] { return nn::FusedBatchNorm(nn::FusedBatchNormOptions(4).relu(relu)); },
            {6, 4, 5, 5});
  }
  for (const auto dtype : kDtypes)
    compare([] { return nn::FusedBatchNorm(nn::FusedBatchNormOptions(4)); }, {6, 4, 5, 5}, dtype);
}

TEST_F(AcceleratorLayers, SyncBatchNorm) {
  compare([] { return parallel::SyncBatchNorm(nn::FusedBatchNormOptions(4), comm::Group()); },
          {6, 4, 5, 5});
}

// Another process with the same batch.
class Twin final : public nn::BatchNormPeers {
 public:
  at::Tensor all_gather(const at::Tensor& own) const override {
    ++calls;
    return at::stack({own, own});
  }
  void all_reduce(at::Tensor& sums) const override {
    ++calls;
    sums.mul_(2);
  }
  mutable int calls = 0;
};

// A layer of LibTorch that convert_sync_batchnorm has marked, and that was moved then.
TEST_F(AcceleratorLayers, ConvertedBatchNormAsksTheOtherProcesses) {
  for (const bool is_inference : {false, true}) {
    torch::nn::BatchNorm2d layer(4);
    const auto twin = std::make_shared<Twin>();
    for (const at::Tensor& tensor : {layer->weight, layer->running_mean})
      nn::set_batch_norm_mark(tensor, {twin});
    move(*layer, device());
    torch::manual_seed(3);
    const at::Tensor input = torch::randn({6, 4, 5, 5});
    // Its gradient needs the sums of all processes.
    const at::Tensor leaf = input.to(device()).requires_grad_(!is_inference);
    const c10::InferenceMode mode(is_inference);
    const at::Tensor output = layer(leaf);
    EXPECT_EQ(twin->calls, 1);
    const at::Tensor wanted =
        (input - input.mean({0, 2, 3}, true)) / (input.var({0, 2, 3}, false, true) + 1e-5).sqrt();
    EXPECT_TRUE(at::allclose(output.cpu(), wanted, 1e-4, 1e-5));
    if (is_inference) continue;
    output.square().sum().backward();
    EXPECT_EQ(twin->calls, 2);
  }
}

TEST_F(AcceleratorLayers, DropoutKeepsWhatItDoesNotDrop) {
  const auto x = torch::ones({1000}, device());
  const auto y = nn::fused_dropout(x, 0.5).cpu();
  EXPECT_TRUE(torch::logical_or(y == 0, y == 2).all().item<bool>());
  EXPECT_NEAR(y.mean().item<double>(), 1, 0.3);
  expect_bitwise_equal(nn::fused_dropout_add(x, x, 0.5, false).cpu(), torch::full({1000}, 2.));
}

// A graph cannot copy the states of a device's generators.
TEST_F(AcceleratorLayers, CheckpointsInACaptureDoNotPreserveRandomNumbers) {
  const CaptureScope capturing;
  const at::Tensor x = torch::ones({3}).to(device()).requires_grad_();
  const auto twice = [](const at::Tensor& y) { return y * 2; };
  expect_error([&] { nn::checkpoint(twice, x); }, {"[nn.checkpoint]", "preserve_rng_state(false)"});
  nn::checkpoint(nn::CheckpointOptions().preserve_rng_state(false), twice, x).sum().backward();
  EXPECT_TRUE(torch::equal(x.grad().cpu(), torch::full({3}, 2.0F)));
}

}  // namespace
}  // namespace semitone::test::accelerator
