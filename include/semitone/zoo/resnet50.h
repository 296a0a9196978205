#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

/// The network that scaling is measured with.
namespace semitone::bench {

/// ResNet-50 (He et al. 2015, with the stride in the 3 x 3 convolution, as torchvision has it):
/// 25,557,032 parameters for 1000 classes. Images of any size from 32 x 32.
class Resnet50Impl : public torch::nn::Module {
 public:
  explicit Resnet50Impl(std::int64_t classes = 1000);
  /// [N, 3, H, W] to [N, classes].
  at::Tensor forward(const at::Tensor& images);

 private:
  torch::nn::Sequential features_;
  torch::nn::Linear head_;
};
TORCH_MODULE(Resnet50);

}  // namespace semitone::bench
