#include "benchmarks/support/resnet50.h"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/pooling.h>
#include <torch/types.h>

#include <array>

namespace semitone::bench {
namespace {

namespace nn = torch::nn;

constexpr std::int64_t kExpansion = 4;

nn::Sequential convolution(std::int64_t in, std::int64_t out, std::int64_t size,
                           std::int64_t stride) {
  return nn::Sequential(
      nn::Conv2d(nn::Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(false)),
      nn::BatchNorm2d(out));
}

// 1 x 1, 3 x 3, 1 x 1, and the way around them.
class BottleneckImpl : public nn::Module {
 public:
  BottleneckImpl(std::int64_t in, std::int64_t width, std::int64_t stride)
      : reduce_(register_module("reduce", convolution(in, width, 1, 1))),
        middle_(register_module("middle", convolution(width, width, 3, stride))),
        expand_(register_module("expand", convolution(width, width * kExpansion, 1, 1))) {
    if (stride != 1 || in != width * kExpansion)
      shortcut_ = register_module("shortcut", convolution(in, width * kExpansion, 1, stride));
  }

  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = torch::relu(reduce_->forward(x));
    y = torch::relu(middle_->forward(y));
    y = expand_->forward(y);
    return torch::relu(y.add_(shortcut_.is_empty() ? x : shortcut_->forward(x)));
  }

 private:
  nn::Sequential reduce_;
  nn::Sequential middle_;
  nn::Sequential expand_;
  nn::Sequential shortcut_{nullptr};
};
TORCH_MODULE(Bottleneck);

}  // namespace

Resnet50Impl::Resnet50Impl(std::int64_t classes)
    : head_(register_module("head", nn::Linear(512 * kExpansion, classes))) {
  features_->extend(*convolution(3, 64, 7, 2));
  features_->push_back(nn::Functional([](at::Tensor x) { return torch::relu(x); }));
  features_->push_back(nn::MaxPool2d(nn::MaxPool2dOptions(3).stride(2).padding(1)));
  constexpr std::array<std::int64_t, 4> kBlocks{3, 4, 6, 3};
  std::int64_t channels = 64;
  std::int64_t width = 64;
  for (std::size_t stage = 0; stage < kBlocks.size(); ++stage, width *= 2) {
    for (std::int64_t block = 0; block < kBlocks[stage]; ++block) {
      features_->push_back(Bottleneck(channels, width, stage > 0 && block == 0 ? 2 : 1));
      channels = width * kExpansion;
    }
  }
  register_module("features", features_);
}

at::Tensor Resnet50Impl::forward(const at::Tensor& images) {
  return head_->forward(features_->forward(images).mean({2, 3}));
}

}  // namespace semitone::bench
