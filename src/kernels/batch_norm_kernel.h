#pragma once

#include "src/kernels/kernels.h"

#include <cstddef>

// The functions on pointers behind batch_norm.h. Each processes a range of pieces of a batch, so
// that threads can share the work.
namespace semitone::kernels {

// The memory layout of a batch (N, C, …): pieces, one after the other. Without channels_last a
// piece is a plane, the `length` values of one image and channel, and piece i has channel i %
// channels. With channels_last a piece is a row: one value for each channel, and length ==
// channels.
struct BatchLayout {
  Format format;
  bool channels_last;
  std::size_t channels;
  std::size_t length;
};

// For each channel: number of values, mean, sum of squared deviations.
struct BatchMoments {
  double* count;
  double* mean;
  double* m2;
};

// Merges the pieces [begin, end) into the moments.
void batch_moments(const BatchLayout& layout, const void* input, std::size_t begin, std::size_t end,
                   const BatchMoments& moments);

// output = round((input - mean) * scale + shift + residual), then 0 where that is negative if relu
// is set. mean, scale and shift have a value for each channel; residual may be null. Each operation
// is rounded to fp32.
struct BatchNormalize {
  const void* input;
  const void* residual;
  void* output;
  const float* mean;
  const float* scale;
  const float* shift;
  bool relu;
};
void batch_normalize(const BatchLayout& layout, const BatchNormalize& work, std::size_t begin,
                     std::size_t end);

struct BatchGradient {
  const void* grad;
  const void* input;
  const float* mean;
  void* output = nullptr;  // batch_gradient_of_input only, and b and c
  const float* a = nullptr;
  const float* b = nullptr;
  const float* c = nullptr;
  // Where relu's result is 0, its gradient `grad` is 0 before anything else.
  // relu(round((input - mean) * a + shift)), computed again: without a residual.
  const float* shift = nullptr;
  // Its result, and memory for the gradient with these zeros, in the sums only: with a residual,
  // whose gradient that is.
  const void* result = nullptr;
  void* masked = nullptr;
};

// Adds grad and grad * (input - mean) of the pieces [begin, end) to each channel's sums.
void batch_gradient_sums(const BatchLayout& layout, const BatchGradient& work, std::size_t begin,
                         std::size_t end, double* sums, double* centred_sums);

// output = round((input - mean) * b + c + grad * a).
void batch_gradient_of_input(const BatchLayout& layout, const BatchGradient& work,
                             std::size_t begin, std::size_t end);

// The largest number that is rounded to 0, to nearest, in a format.
constexpr float vanishing(Format format) {
  switch (format) {
    case Format::fp16:
      return 0x1p-25F;
    case Format::bf16:
      return 0x1p-134F;
    case Format::fp32:
      break;
  }
  return 0;
}

// The same for all pieces of a batch at once. Sums are left in parts, for batch_channels_kernel.h:
// `parts` is memory for batch_parts_cuda(…) * 3 (or 2, for gradients) * channels numbers, and
// receives (parts, 3, channels) of mean, m2 and count, or (parts, 2, channels) of the sums. The
// results are the numbers of parts, which depend on the shape and on the tensors' alignment.
SEMITONE_CUDA_KERNEL(std::size_t batch_parts_cuda(const BatchLayout& layout, std::size_t pieces));
SEMITONE_CUDA_KERNEL(std::size_t batch_moments_cuda(const BatchLayout& layout, const void* input,
                                                    std::size_t pieces, double* parts,
                                                    CudaStream stream));
SEMITONE_CUDA_KERNEL(void batch_normalize_cuda(const BatchLayout& layout,
                                               const BatchNormalize& work, std::size_t pieces,
                                               CudaStream stream));
SEMITONE_CUDA_KERNEL(std::size_t batch_gradient_sums_cuda(const BatchLayout& layout,
                                                          const BatchGradient& work,
                                                          std::size_t pieces, double* parts,
                                                          CudaStream stream));
SEMITONE_CUDA_KERNEL(void batch_gradient_of_input_cuda(const BatchLayout& layout,
                                                       const BatchGradient& work,
                                                       std::size_t pieces, CudaStream stream));

}  // namespace semitone::kernels
