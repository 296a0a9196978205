#include "src/zoo/resnet_layers.h"

#include "semitone/recompute/checkpoint.h"

#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/pooling.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstddef>

namespace semitone::zoo {
namespace {

namespace nn = torch::nn;

// The shortcut of a block; empty if it is the block's input.
nn::Sequential shortcut(std::int64_t in, std::int64_t out, std::int64_t stride) {
  if (stride == 1 && in == out) return nullptr;
  return convolution(in, out, 1, stride);
}

void set_gain(nn::Sequential& last, double gain) {
  nn::init::constant_((*last)[1]->as<nn::BatchNorm2d>()->weight, gain);
}

// 3 x 3, 3 x 3, and the shortcut.
class BasicBlockImpl : public nn::Cloneable<BasicBlockImpl> {
 public:
  static constexpr std::int64_t kExpansion = 1;

  BasicBlockImpl(std::int64_t in, std::int64_t width, std::int64_t stride, double gain)
      : in_(in), width_(width), stride_(stride), gain_(gain) {
    reset();
  }

  void reset() override {
    first_ = register_module("first", convolution(in_, width_, 3, stride_));
    second_ = register_module("second", convolution(width_, width_, 3, 1));
    set_gain(second_, gain_);
    shortcut_ = shortcut(in_, width_, stride_);
    if (!shortcut_.is_empty()) register_module("shortcut", shortcut_);
  }

  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = second_->forward(torch::relu(first_->forward(x)));
    return torch::relu(y.add_(shortcut_.is_empty() ? x : shortcut_->forward(x)));
  }

 private:
  std::int64_t in_;
  std::int64_t width_;
  std::int64_t stride_;
  double gain_;
  nn::Sequential first_{nullptr};
  nn::Sequential second_{nullptr};
  nn::Sequential shortcut_{nullptr};
};
TORCH_MODULE(BasicBlock);

// 1 x 1, 3 x 3, 1 x 1, and the shortcut.
class BottleneckImpl : public nn::Cloneable<BottleneckImpl> {
 public:
  static constexpr std::int64_t kExpansion = 4;

  BottleneckImpl(std::int64_t in, std::int64_t width, std::int64_t stride, double gain)
      : in_(in), width_(width), stride_(stride), gain_(gain) {
    reset();
  }

  void reset() override {
    const std::int64_t out = width_ * kExpansion;
    reduce_ = register_module("reduce", convolution(in_, width_, 1, 1));
    middle_ = register_module("middle", convolution(width_, width_, 3, stride_));
    expand_ = register_module("expand", convolution(width_, out, 1, 1));
    set_gain(expand_, gain_);
    shortcut_ = shortcut(in_, out, stride_);
    if (!shortcut_.is_empty()) register_module("shortcut", shortcut_);
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

template <typename Block>
ResNetLayers layers_of(const std::array<std::int64_t, 4>& blocks, double gain) {
  ResNetLayers layers{convolution(3, 64, 7, 2), 64};
  layers.features->push_back(nn::Functional([](const at::Tensor& x) { return torch::relu(x); }));
  layers.features->push_back(nn::MaxPool2d(nn::MaxPool2dOptions(3).stride(2).padding(1)));
  std::int64_t width = 64;
  for (std::size_t stage = 0; stage < blocks.size(); ++stage, width *= 2) {
    for (std::int64_t block = 0; block < blocks[stage]; ++block) {
      layers.features->push_back(
          Block(layers.channels, width, stage > 0 && block == 0 ? 2 : 1, gain));
      layers.channels = width * Block::Impl::kExpansion;
    }
  }
  return layers;
}

}  // namespace

nn::Sequential convolution(std::int64_t in, std::int64_t out, std::int64_t size,
                           std::int64_t stride) {
  return nn::Sequential(
      nn::Conv2d(nn::Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(false)),
      nn::BatchNorm2d(out));
}

ResNetLayers basic_layers(const std::array<std::int64_t, 4>& blocks, double gain) {
  return layers_of<BasicBlock>(blocks, gain);
}

ResNetLayers bottleneck_layers(const std::array<std::int64_t, 4>& blocks, double gain) {
  return layers_of<Bottleneck>(blocks, gain);
}

at::Tensor forward_checkpointed(nn::SequentialImpl& features, const at::Tensor& images) {
  constexpr std::ptrdiff_t kBeforeBlocks = 4;  // convolution, BatchNorm, ReLU, pooling
  at::Tensor x = images;
  for (auto layer = features.begin(); layer != features.end();) {
    // Those before the blocks, whose results are the largest, are one part.
    const auto end = layer + (layer == features.begin() ? kBeforeBlocks : 1);
    nn::Sequential part;
    for (; layer != end; ++layer) part->push_back(*layer);
    x = semitone::nn::checkpoint(part, x);
  }
  return x;
}

}  // namespace semitone::zoo
