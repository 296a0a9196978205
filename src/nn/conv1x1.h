#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

namespace semitone::nn {

// Whether conv1x1 takes these: an input (N, C, H, W) of 16 bits on the CPU, channels last in memory,
// a weight (K, C, 1, 1) without gaps and an undefined bias or one (K), of the input's dtype.
bool fits_conv1x1(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias);

// at::conv2d with a kernel of 1 x 1 and no padding, which is a product of matrices. The forward pass
// is LibTorch's; the gradients are products, where oneDNN's convolutions would bring a weight into a
// layout of their own and its gradient back: of ResNet-50's 36 such layers, 2 AMX cores and 16 images
// of 224 x 224, the weights' gradients take 66 ms and not 93, and those of the three with a stride of
// 2 take 14 and not 39 in all. Sums in fp32, rounded once. Gradients can be differentiated again, by
// LibTorch's operators.
at::Tensor conv1x1(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                   std::array<std::int64_t, 2> stride);

}  // namespace semitone::nn
