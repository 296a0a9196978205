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
  // batch_gradient_of_input only
  void* output = nullptr;
  const float* a = nullptr;
  const float* b = nullptr;
  const float* c = nullptr;
};

// Adds grad and grad * (input - mean) of the pieces [begin, end) to each channel's sums.
void batch_gradient_sums(const BatchLayout& layout, const BatchGradient& work, std::size_t begin,
                         std::size_t end, double* sums, double* centred_sums);

// output = round((input - mean) * b + c + grad * a).
void batch_gradient_of_input(const BatchLayout& layout, const BatchGradient& work,
                             std::size_t begin, std::size_t end);

// The same for all pieces of a batch at once. parts: memory for batch_parts_cuda(…) * 3 (or 2, for
// sums) * channels numbers. Means, sums and so on have one number for each channel.
SEMITONE_CUDA_KERNEL(std::size_t batch_parts_cuda(const BatchLayout& layout, std::size_t pieces));
SEMITONE_CUDA_KERNEL(void batch_moments_cuda(const BatchLayout& layout, const void* input,
                                             std::size_t pieces, double* parts, double* mean,
                                             double* m2, CudaStream stream));
SEMITONE_CUDA_KERNEL(void batch_normalize_cuda(const BatchLayout& layout,
                                               const BatchNormalize& work, std::size_t pieces,
                                               CudaStream stream));
SEMITONE_CUDA_KERNEL(void batch_gradient_sums_cuda(const BatchLayout& layout,
                                                   const BatchGradient& work, std::size_t pieces,
                                                   double* parts, double* sums,
                                                   double* centred_sums, CudaStream stream));
SEMITONE_CUDA_KERNEL(void batch_gradient_of_input_cuda(const BatchLayout& layout,
                                                       const BatchGradient& work,
                                                       std::size_t pieces, CudaStream stream));

}  // namespace semitone::kernels
