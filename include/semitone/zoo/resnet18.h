#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

namespace semitone::zoo {

/// ResNet-18 (He et al. 2015), as in torchvision: 11,689,512 parameters for 1000 classes, with
/// LibTorch's initial weights.
class ResNet18Impl : public torch::nn::Cloneable<ResNet18Impl> {
 public:
  /// @param classes        number of outputs, above 0; 1000 for ImageNet. Error otherwise.
  /// @param residual_gain  initial weight of each block's last BatchNorm, see ResNet50Impl
  explicit ResNet18Impl(std::int64_t classes = 1000, double residual_gain = 1);
  void reset() override;

  /// @param images  (N, 3, H, W), floating, at least 32 x 32
  /// @return        logits, (N, classes)
  at::Tensor forward(const at::Tensor& images);

  torch::nn::Sequential features{nullptr};
  torch::nn::Linear head{nullptr};

 private:
  std::int64_t classes_;
  double residual_gain_;
};
TORCH_MODULE(ResNet18);

}  // namespace semitone::zoo
