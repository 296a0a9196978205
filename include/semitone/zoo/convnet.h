#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

namespace semitone::zoo {

/// The network of the data-parallel tutorials for MNIST. It has two blocks of 5 x 5 convolution,
/// BatchNorm, ReLU and 2 x 2 max pooling (1 -> 16 -> 32 channels), and a linear layer. 29,034
/// parameters.
class ConvNetImpl : public torch::nn::Cloneable<ConvNetImpl> {
 public:
  /// @param classes  number of outputs; 10 for MNIST
  explicit ConvNetImpl(int64_t classes = 10);
  void reset() override;

  /// @param images  (N, 1, 28, 28), floating
  /// @return        logits, (N, classes)
  at::Tensor forward(const at::Tensor& images);

  torch::nn::Conv2d conv1{nullptr};
  torch::nn::BatchNorm2d bn1{nullptr};
  torch::nn::Conv2d conv2{nullptr};
  torch::nn::BatchNorm2d bn2{nullptr};
  torch::nn::Linear fc{nullptr};

 private:
  int64_t classes_;
};
TORCH_MODULE(ConvNet);

}  // namespace semitone::zoo
