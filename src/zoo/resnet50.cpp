#include "semitone/zoo/resnet50.h"

#include "semitone/core/error.h"

#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/pooling.h>
#include <torch/types.h>

#include <array>
#include <string>

namespace semitone::zoo {
namespace {

namespace nn = torch::nn;

constexpr std::int64_t kExpansion = 4;

nn::Sequential convolution(std::int64_t in, std::int64_t out, std::int64_t size,
                           std::int64_t stride) {
  return nn::Sequential(
      nn::Conv2d(nn::Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(false)),
      nn::BatchNorm2d(out));
}

// 1 x 1, 3 x 3, 1 x 1, and the shortcut.
class BottleneckImpl : public nn::Cloneable<BottleneckImpl> {
 public:
  BottleneckImpl(std::int64_t in, std::int64_t width, std::int64_t stride, double gain)
      : in_(in), width_(width), stride_(stride), gain_(gain) {
    reset();
  }

  void reset() override {
    const std::int64_t out = width_ * kExpansion;
    reduce_ = register_module("reduce", convolution(in_, width_, 1, 1));
    middle_ = register_module("middle", convolution(width_, width_, 3, stride_));
    expand_ = register_module("expand", convolution(width_, out, 1, 1));
    nn::init::constant_((*expand_)[1]->as<nn::BatchNorm2d>()->weight, gain_);
    if (stride_ != 1 || in_ != out)
      shortcut_ = register_module("shortcut", convolution(in_, out, 1, stride_));
  }

  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = torch::relu(reduce_->forward(x));
    y = torch::relu(middle_->forward(y));
    y = expand_->forward(y);
    return torch::relu(y.add_(shortcut_.is_empty() ? x : shortcut_->forward(x)));
  }

 private:
  std::int64_t in_;
  std::int64_t width_;
  std::int64_t stride_;
  double gain_;
  nn::Sequential reduce_{nullptr};
  nn::Sequential middle_{nullptr};
  nn::Sequential expand_{nullptr};
  nn::Sequential shortcut_{nullptr};
};
TORCH_MODULE(Bottleneck);

}  // namespace

ResNet50Impl::ResNet50Impl(std::int64_t classes, double residual_gain)
    : classes_(classes), residual_gain_(residual_gain) {
  if (classes <= 0) throw Error("zoo.resnet50", "classes above 0", std::to_string(classes));
  reset();
}

void ResNet50Impl::reset() {
  features = register_module("features", convolution(3, 64, 7, 2));
  features->push_back(nn::Functional([](const at::Tensor& x) { return torch::relu(x); }));
  features->push_back(nn::MaxPool2d(nn::MaxPool2dOptions(3).stride(2).padding(1)));
  constexpr std::array<std::int64_t, 4> kBlocks{3, 4, 6, 3};
  std::int64_t channels = 64;
  std::int64_t width = 64;
  for (std::size_t stage = 0; stage < kBlocks.size(); ++stage, width *= 2) {
    for (std::int64_t block = 0; block < kBlocks[stage]; ++block) {
      features->push_back(
          Bottleneck(channels, width, stage > 0 && block == 0 ? 2 : 1, residual_gain_));
      channels = width * kExpansion;
    }
  }
  head = register_module("head", nn::Linear(channels, classes_));
}

at::Tensor ResNet50Impl::forward(const at::Tensor& images) {
  return head->forward(features->forward(images).mean({2, 3}));
}

}  // namespace semitone::zoo
