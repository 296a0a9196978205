#pragma once

// Internal interface: other rooms include this header.

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

namespace semitone::nn {

// Whether conv1x1 supports these arguments: an input (N, C, H, W) of 16 bits on the CPU, channels
// last in memory, a weight (K, C, 1, 1) without gaps, and an undefined bias or one of (K), in the
// input's dtype.
bool fits_conv1x1(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias);

// at::conv2d with a kernel of 1 x 1 and no padding, which is a matrix product. The forward pass is
// LibTorch's. The gradients are matrix products, whereas oneDNN's convolutions would convert a
// weight to an internal layout and its gradient back. For ResNet-50's 36 such layers (2 AMX cores,
// 16 images of 224 x 224) the weights' gradients take 66 ms instead of 93; for the three with a
// stride of 2, all gradients take 14 ms instead of 39. Sums are in fp32, rounded once. Gradients
// can be differentiated again, through LibTorch's operators.
at::Tensor conv1x1(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                   std::array<std::int64_t, 2> stride);

}  // namespace semitone::nn
