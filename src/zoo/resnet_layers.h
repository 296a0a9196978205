#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/sequential.h>

#include <array>
#include <cstdint>

// What ResNet18 and ResNet50 share.
namespace semitone::zoo {

// A convolution without bias, with a padding of size / 2, and BatchNorm.
torch::nn::Sequential convolution(std::int64_t in, std::int64_t out, std::int64_t size,
                                  std::int64_t stride);

// The layers before the head, (N, 3, H, W) to (N, C, H / 32, W / 32): 7 x 7 convolution, max pooling
// and four stages of residual blocks. Each stage has twice the width of the one before, from 64 on,
// and halves the image, except the first one.
struct ResNetLayers {
  torch::nn::Sequential features;
  std::int64_t channels;  // C
};

// Blocks of two 3 x 3 convolutions, and C = 512.
// @param blocks  of each stage
// @param gain    initial weight of each block's last BatchNorm
ResNetLayers basic_layers(const std::array<std::int64_t, 4>& blocks, double gain);
// Blocks of a 1 x 1, a 3 x 3 (with the stride) and a 1 x 1 convolution, and C = 2048.
ResNetLayers bottleneck_layers(const std::array<std::int64_t, 4>& blocks, double gain);

// The result of such layers, of which nn::checkpoint keeps the inputs of blocks only.
at::Tensor forward_checkpointed(torch::nn::SequentialImpl& features, const at::Tensor& images);

}  // namespace semitone::zoo
