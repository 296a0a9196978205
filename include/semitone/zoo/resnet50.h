#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

namespace semitone::zoo {

/// ResNet-50 (He et al. 2015) with the stride in the 3 x 3 convolution, as in torchvision:
/// 25,557,032 parameters for 1000 classes, with LibTorch's initial weights.
class ResNet50Impl : public torch::nn::Cloneable<ResNet50Impl> {
 public:
  /// @param classes        number of outputs, above 0; 1000 for ImageNet. Error otherwise.
  /// @param residual_gain  initial weight of each block's last BatchNorm. With 1 the first
  ///                       gradients depend on rounding: in fp32 they differ by 1 to 2 % from those
  ///                       in fp64 (8 images of 64 x 64). A smaller gain reduces that; 0 is usual
  ///                       for large batches (Goyal et al. 2017).
  /// @param checkpoint_blocks  whether only the inputs of blocks are kept for the backward pass, which
  ///                       runs the blocks again (nn::checkpoint)
  explicit ResNet50Impl(std::int64_t classes = 1000, double residual_gain = 1,
                        bool checkpoint_blocks = false);
  void reset() override;

  /// @param images  (N, 3, H, W), floating, at least 32 x 32
  /// @return        logits, (N, classes)
  at::Tensor forward(const at::Tensor& images);

  torch::nn::Sequential features{nullptr};
  torch::nn::Linear head{nullptr};

 private:
  std::int64_t classes_;
  double residual_gain_;
  bool checkpoint_blocks_;
};
TORCH_MODULE(ResNet50);

}  // namespace semitone::zoo
