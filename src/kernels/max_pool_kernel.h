#pragma once

#include "src/kernels/kernels.h"

#include <cstddef>
#include <cstdint>

// The functions on pointers behind max_pool.h. Each processes a range of rows of a batch, so that
// threads can share the work.
namespace semitone::kernels {

constexpr std::size_t kMostPlaces = 255;  // that a byte can number

// One direction of a plane: window i has `kernel` positions, the first at i * stride - padding.
// Each window has at least one position in the input.
struct PoolAxis {
  std::size_t input;
  std::size_t output;
  std::size_t kernel;
  std::size_t stride;
  std::size_t padding;
};

// Tensors are (N, height, width, channels) in memory. Positions are numbered row by row within
// their window, which has at most kMostPlaces.
struct PoolLayout {
  Format format;
  std::size_t channels;
  PoolAxis height;
  PoolAxis width;
};

// Computes rows [begin, end) of the N * height.output of the output: the first of the largest
// values in each window, or its last NaN, and its position if `places` is not null.
void max_pool(const PoolLayout& layout, const void* input, void* output, std::uint8_t* places,
              std::size_t begin, std::size_t end);

// Computes rows [begin, end) of the N * height.input of the input's gradient: the gradients of the
// windows in which an element is the maximum, added in fp32 window by window, row by row, and
// rounded once. A single gradient is copied, and without any the result is 0.
void max_pool_backward(const PoolLayout& layout, const void* grad, const std::uint8_t* places,
                       void* grad_input, std::size_t begin, std::size_t end);

// The same for this number of images.
SEMITONE_CUDA_KERNEL(void max_pool_cuda(const PoolLayout& layout, const void* input, void* output,
                                        std::uint8_t* places, std::size_t images,
                                        CudaStream stream));
SEMITONE_CUDA_KERNEL(void max_pool_backward_cuda(const PoolLayout& layout, const void* grad,
                                                 const std::uint8_t* places, void* grad_input,
                                                 std::size_t images, CudaStream stream));

}  // namespace semitone::kernels
