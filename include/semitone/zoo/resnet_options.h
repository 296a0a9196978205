#pragma once

#include <torch/arg.h>

#include <cstdint>

namespace semitone::zoo {

/// Options of ResNet18 and ResNet50.
struct ResNetOptions {
  ResNetOptions(std::int64_t classes = 1000)  // NOLINT(google-explicit-constructor): as LibTorch's
      : classes_(classes) {}

  /// Number of outputs, above 0; 1000 for ImageNet.
  TORCH_ARG(std::int64_t, classes);
  /// Initial weight of each block's last BatchNorm. With 1 the first gradients depend on rounding:
  /// in fp32 those of ResNet-50 differ by 1 to 2 % from those in fp64 (8 images of 64 x 64). A
  /// smaller gain reduces that; 0 is usual for large batches (Goyal et al. 2017).
  TORCH_ARG(double, residual_gain) = 1;
  /// Whether only the inputs of blocks are kept for the backward pass, which runs the blocks again
  /// (nn::checkpoint).
  TORCH_ARG(bool, checkpoint_blocks) = false;
};

}  // namespace semitone::zoo
