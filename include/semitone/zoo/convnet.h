#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

namespace semitone::zoo {

/// Sizes of a ConvNet. The defaults are those of MNIST.
struct ConvNetOptions {
  TORCH_ARG(std::int64_t, classes) = 10;
  TORCH_ARG(std::int64_t, channels) = 1;
  /// Height and width of the images, at least 4.
  TORCH_ARG(std::int64_t, image_height) = 28;
  TORCH_ARG(std::int64_t, image_width) = 28;
};

/// The network of the data-parallel tutorials for MNIST. It has two blocks of 5 x 5 convolution,
/// BatchNorm, ReLU and 2 x 2 max pooling (1 -> 16 -> 32 channels), and a linear layer. 29,034
/// parameters. For other images, the first convolution has their channels, and the linear layer has
/// 32 * (image_height / 4) * (image_width / 4) inputs, rounded down in each direction.
class ConvNetImpl : public torch::nn::Cloneable<ConvNetImpl> {
 public:
  /// @param classes  number of outputs; 10 for MNIST
  explicit ConvNetImpl(std::int64_t classes = 10);
  /// Error for a size below 1, or an image_height or image_width below 4.
  explicit ConvNetImpl(const ConvNetOptions& options);
  void reset() override;

  /// @param images  (N, channels, image_height, image_width), floating
  /// @return        logits, (N, classes)
  at::Tensor forward(const at::Tensor& images);

  torch::nn::Conv2d conv1{nullptr};
  torch::nn::BatchNorm2d bn1{nullptr};
  torch::nn::Conv2d conv2{nullptr};
  torch::nn::BatchNorm2d bn2{nullptr};
  torch::nn::Linear fc{nullptr};

 private:
  ConvNetOptions options_;
};
TORCH_MODULE(ConvNet);

}  // namespace semitone::zoo
