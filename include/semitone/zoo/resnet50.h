#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

namespace semitone::zoo {

/// ResNet-50 (He et al. 2015) with the stride in the 3 x 3 convolution, as torchvision has it:
/// 25,557,032 parameters for 1000 classes, LibTorch's initial weights.
class ResNet50Impl : public torch::nn::Cloneable<ResNet50Impl> {
 public:
  /// @param classes  outputs, above 0; 1000 for ImageNet. Error otherwise.
  explicit ResNet50Impl(std::int64_t classes = 1000);
  void reset() override;

  /// @param images  (N, 3, H, W), floating, from 32 x 32 on
  /// @return        logits, (N, classes)
  at::Tensor forward(const at::Tensor& images);

  torch::nn::Sequential features{nullptr};
  torch::nn::Linear head{nullptr};

 private:
  std::int64_t classes_;
};
TORCH_MODULE(ResNet50);

}  // namespace semitone::zoo
