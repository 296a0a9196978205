#pragma once

#include "src/kernels/kernels.h"

#include <cstddef>
#include <cstdint>

// The functions on pointers behind max_pool.h: each does some rows of a batch, so that threads can
// share it.
namespace semitone::kernels {

constexpr std::size_t kMostPlaces = 255;  // that a byte can number

// One direction of a plane: window i has `kernel` places, the first at i * stride - padding. Each
// window has a place in the input.
struct PoolAxis {
  std::size_t input;
  std::size_t output;
  std::size_t kernel;
  std::size_t stride;
  std::size_t padding;
};

// Tensors are (N, height, width, channels) in memory. Places are numbered row by row within their
// window, which has at most kMostPlaces.
struct PoolLayout {
  Format format;
  std::size_t channels;
  PoolAxis height;
  PoolAxis width;
};

// Rows [begin, end) of the N * height.output of the output: the first of the largest values in each
// window, or its last NaN, and its place if `places` is not null.
void max_pool(const PoolLayout& layout, const void* input, void* output, std::uint8_t* places,
              std::size_t begin, std::size_t end);

// Rows [begin, end) of the N * height.input of the input's gradient: the gradients of the windows
// whose maximum an element is, added up in fp32 window by window, row by row, and rounded once. One
// gradient is copied, and without any the result is 0.
void max_pool_backward(const PoolLayout& layout, const void* grad, const std::uint8_t* places,
                       void* grad_input, std::size_t begin, std::size_t end);

}  // namespace semitone::kernels
