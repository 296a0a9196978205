// The memory format of convolutions after initialize.

#include "semitone/amp/initialize.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>
#include <vector>

namespace semitone::amp::memory_format_test {
namespace {

using at::MemoryFormat;
using testing::HasSubstr;

bool is_channels_last(const at::Tensor& tensor) {
  return tensor.suggest_memory_format() == MemoryFormat::ChannelsLast;
}

// Flattens the results of its convolutions with view(), as much code does.
class ImageNetImpl : public torch::nn::Module {
 public:
  ImageNetImpl() {
    first = register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 6, 3)));
    second = register_module(
        "second", torch::nn::ConvTranspose2d(torch::nn::ConvTranspose2dOptions(6, 4, 2)));
    head = register_module("head", torch::nn::Linear(4 * 7 * 7, 3));
    positions = register_parameter("positions", torch::randn({1, 4, 7, 7}));
  }
  at::Tensor forward(const at::Tensor& images) {
    at::Tensor x = torch::relu(first->forward(images));
    x = second->forward(x) + positions;
    strides_seen = x.strides().vec();
    return head->forward(x.view({x.size(0), -1}));
  }

  torch::nn::Conv2d first{nullptr};
  torch::nn::ConvTranspose2d second{nullptr};
  torch::nn::Linear head{nullptr};
  at::Tensor positions;
  std::vector<std::int64_t> strides_seen;
};
TORCH_MODULE(ImageNet);

Options quiet(OptLevel level) {
  return Options(level).dtype(torch::kBFloat16).verbosity(0);
}

struct Training {
  explicit Training(const Options& options) {
    torch::manual_seed(0);
    model = ImageNet();
    optimizer = std::make_unique<torch::optim::SGD>(model->parameters(),
                                                    torch::optim::SGDOptions(0.1).momentum(0.9));
    mixed = std::make_unique<MixedPrecision>(initialize(model, *optimizer, options));
  }

  double step() {
    torch::manual_seed(1);
    optimizer->zero_grad();
    const at::Tensor output = mixed->forward(model, torch::rand({5, 1, 8, 8}));
    const at::Tensor loss = torch::mse_loss(output, torch::ones_like(output));
    mixed->scale_loss(loss, *optimizer).backward();
    mixed->step(*optimizer);
    return loss.item<double>();
  }

  ImageNet model{nullptr};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<MixedPrecision> mixed;
};

class Levels : public testing::TestWithParam<OptLevel> {};

TEST_P(Levels, In16BitsConvolutionsAreChannelsLastAndComputeTheSame) {
  Training chosen(quiet(GetParam()).choose_memory_format());
  Training preserved(quiet(GetParam()));
  EXPECT_EQ(chosen.mixed->properties().memory_format, MemoryFormat::ChannelsLast);
  EXPECT_EQ(preserved.mixed->properties().memory_format, MemoryFormat::Preserve);
  EXPECT_TRUE(is_channels_last(chosen.model->first->weight));
  EXPECT_TRUE(is_channels_last(chosen.model->second->weight));
  EXPECT_FALSE(is_channels_last(preserved.model->first->weight));
  // Weights of convolutions alone.
  EXPECT_TRUE(chosen.model->positions.is_contiguous());
  for (int i = 0; i < 4; ++i) {
    const double want = preserved.step();
    EXPECT_NEAR(chosen.step(), want, want * test::reduction_tolerance(torch::kBFloat16, 200));
    EXPECT_EQ(chosen.model->strides_seen[1], 1);
    EXPECT_NE(preserved.model->strides_seen[1], 1);
  }
  EXPECT_TRUE(is_channels_last(chosen.model->first->weight));
  for (std::size_t i = 0; i < preserved.model->parameters().size(); ++i) {
    EXPECT_TRUE(test::near(chosen.model->parameters()[i], preserved.model->parameters()[i],
                           test::reduction_tolerance(torch::kBFloat16, 200)));
  }
}

INSTANTIATE_TEST_SUITE_P(All, Levels, testing::Values(OptLevel::O1, OptLevel::O2, OptLevel::O3),
                         [](const auto& level) { return std::string(name_of(level.param)); });

TEST(MemoryFormatOfModels, StaysAsItIsWhereThatIsBetter) {
  const auto chosen = [](const Training& training) {
    return training.mixed->properties().memory_format;
  };
  EXPECT_EQ(chosen(Training(quiet(OptLevel::O0).choose_memory_format())), MemoryFormat::Preserve);
  // LibTorch's view raises, so a policy without Semitone's keeps the model as it is.
  Training stock(quiet(OptLevel::O1).policy(CastPolicy::torch()).choose_memory_format());
  EXPECT_EQ(chosen(stock), MemoryFormat::Preserve);
  EXPECT_GT(stock.step(), 0);

  torch::nn::Linear linear(3, 2);
  const auto without = initialize(linear, quiet(OptLevel::O1).choose_memory_format());
  EXPECT_EQ(without.properties().memory_format, MemoryFormat::Preserve);
  ImageNet model;
  torch::optim::LBFGS lbfgs(model->parameters());
  const auto viewed = initialize(model, lbfgs, quiet(OptLevel::O1).choose_memory_format());
  EXPECT_EQ(viewed.properties().memory_format, MemoryFormat::Preserve);
  ImageNet off;
  const auto disabled =
      initialize(off, quiet(OptLevel::O1).enabled(false).memory_format(MemoryFormat::ChannelsLast));
  EXPECT_FALSE(is_channels_last(off->first->weight));
}

TEST(MemoryFormatOfModels, IsWhatSomebodyAskedFor) {
  Training last(quiet(OptLevel::O0).memory_format(MemoryFormat::ChannelsLast));
  EXPECT_TRUE(is_channels_last(last.model->first->weight));
  EXPECT_THAT(last.mixed->properties().to_string(),
              HasSubstr("memory_format         ChannelsLast"));

  torch::nn::Conv2d conv(torch::nn::Conv2dOptions(8, 4, 3));
  conv->weight.set_data(conv->weight.detach().contiguous(MemoryFormat::ChannelsLast));
  const at::Tensor before = conv->weight.detach().clone();
  const auto mixed = initialize(conv, quiet(OptLevel::O1).memory_format(MemoryFormat::Contiguous));
  EXPECT_TRUE(conv->weight.is_contiguous());
  test::expect_bitwise_equal(conv->weight.detach(), before);

  test::expect_error([] { Options().memory_format(MemoryFormat::ChannelsLast3d); },
                     {"[amp.options.memory_format]", "ChannelsLast", "ChannelsLast3d"});
}

TEST(MemoryFormatOfModels, SharedWeightsStayShared) {
  torch::nn::Sequential model(torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 4, 3)),
                              torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 4, 3)));
  at::Tensor& first = model[0]->as<torch::nn::Conv2d>()->weight;
  at::Tensor& second = model[1]->as<torch::nn::Conv2d>()->weight;
  second.set_data(first.detach());
  const auto* const identity = first.unsafeGetTensorImpl();
  first.mutable_grad() = torch::ones_like(first);
  const auto mixed = initialize(model, quiet(OptLevel::O1).choose_memory_format());
  EXPECT_EQ(first.unsafeGetTensorImpl(), identity);
  EXPECT_TRUE(is_channels_last(first));
  EXPECT_TRUE(is_channels_last(first.grad()));
  EXPECT_EQ(first.const_data_ptr(), second.const_data_ptr());
}

TEST(MemoryFormatOfModels, TorchScriptModelsAreLaidOutToo) {
  torch::jit::Module script("Conv2d");
  script.register_parameter("weight", torch::randn({4, 3, 5, 5}), /*is_buffer=*/false);
  script.define("def forward(self, x):\n  return torch.conv2d(x, self.weight)\n");
  const auto mixed = initialize(script, quiet(OptLevel::O1).choose_memory_format());
  EXPECT_TRUE(is_channels_last(script.attr("weight").toTensor()));
  torch::jit::Module other("Conv2d");  // made by other code
  other.register_parameter("weight", torch::randn({4, 3}), /*is_buffer=*/false);
  EXPECT_NO_THROW(std::ignore = initialize(other, quiet(OptLevel::O1).choose_memory_format()));
}

TEST(MemoryFormatOfModels, ViewsCopyOnlyWhereLibTorchCannotShowThem) {
  const at::Tensor x = torch::randn({2, 3, 4, 5}).contiguous(MemoryFormat::ChannelsLast);
  const Autocast region(CastPolicy::semitone({torch::kCPU, torch::kBFloat16}));
  test::expect_bitwise_equal(x.view({2, -1}), x.reshape({2, 60}));
  EXPECT_FALSE(x.view({2, -1}).is_alias_of(x));
  EXPECT_TRUE(x.view({2, 3, 20}).is_alias_of(x));
  EXPECT_THROW(x.view({7, -1}), c10::Error);
  EXPECT_THROW(x.transpose(0, 2).view({-1}), c10::Error);
  const Autocast stock(CastPolicy::torch());
  EXPECT_THROW(x.view({2, -1}), c10::Error);
}

}  // namespace
}  // namespace semitone::amp::memory_format_test
