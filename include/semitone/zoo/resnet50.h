#pragma once

#include "semitone/zoo/resnet_options.h"

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

namespace semitone::zoo {

/// ResNet-50 (He et al. 2015) with the stride in the 3 x 3 convolution, as in torchvision:
/// 25,557,032 parameters for 1000 classes, with LibTorch's initial weights.
class ResNet50Impl : public torch::nn::Cloneable<ResNet50Impl> {
 public:
  /// Error unless there is a class.
  explicit ResNet50Impl(const ResNetOptions& options_ = {});
  void reset() override;

  /// @param images  (N, 3, H, W), floating, at least 32 x 32
  /// @return        logits, (N, classes)
  at::Tensor forward(const at::Tensor& images);

  ResNetOptions options;
  torch::nn::Sequential features{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(ResNet50);

}  // namespace semitone::zoo
