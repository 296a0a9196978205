#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

// Maximum pooling of (N, C, H, W) with one byte an element for the backward pass, where LibTorch
// keeps eight.
namespace semitone::kernels {

// Each of height and width, as for at::max_pool2d, which has dilation 1 and no ceil_mode here.
struct MaxPool {
  std::array<std::int64_t, 2> kernel;
  std::array<std::int64_t, 2> stride;
  std::array<std::int64_t, 2> padding;

  std::int64_t window() const { return kernel[0] * kernel[1]; }
};

// Windows may have so many elements that a byte can number them.
constexpr std::int64_t kMaxPoolWindow = 255;

// Output, and of each of its elements where in its window the maximum was, uint8: row by row from
// the window's first place, padding counted. Undefined if not requested.
struct MaxPooled {
  at::Tensor output;
  at::Tensor places;
};

// Whether there is a kernel for it: fp32, fp16 or bf16, channels last in memory, on the CPU or on CUDA
// in a build that has CUDA kernels. The rest takes the definition's path.
bool has_max_pool_kernel(const at::Tensor& input, const MaxPool& pool);

// As at::max_pool2d_with_indices: the first of equal maxima is taken, the last NaN before any
// number, never the padding. Output and places are laid out as LibTorch's. A window has at most
// kMaxPoolWindow elements if places are requested.
MaxPooled max_pool2d(const at::Tensor& input, const MaxPool& pool, bool with_places);

// The input's gradient, in its dtype and layout; nothing else of the input matters. Gradients that
// meet in an element, where windows overlap, are added in fp32 (fp64 if the input is) and rounded
// once. One alone is copied, so -0 stays -0. The result does not depend on the number of threads.
at::Tensor max_pool2d_backward(const at::Tensor& grad, const at::Tensor& places,
                               const at::Tensor& input, const MaxPool& pool);

namespace ref {
// The definitions, composed of ATen operators.
MaxPooled max_pool2d(const at::Tensor& input, const MaxPool& pool, bool with_places);
at::Tensor max_pool2d_backward(const at::Tensor& grad, const at::Tensor& places,
                               const at::Tensor& input, const MaxPool& pool);
}  // namespace ref

}  // namespace semitone::kernels
