#pragma once

#include "src/kernels/kernels.h"

#include <cstddef>

// The functions on pointers behind layer_norm.h. Each processes a range of rows, so that threads
// can share the work.
namespace semitone::kernels {

// output = round((input - mean) * rstd * weight + bias), where mean is the row's mean if centred is
// set, else 0, and rstd = 1 / sqrt(mean of (input - mean)^2 + eps).
struct LayerNormalize {
  const void* input;
  void* output;
  const float* weight;  // null for CUDA kernels: 1
  const float* bias;    // null for CUDA kernels: none
  bool centred;
  double eps;
  // Receive a value for each row. Both may be null; mean is null if centred is not set.
  float* mean;
  float* rstd;
};
void layer_normalize(const RowLayout& layout, const LayerNormalize& work, std::size_t begin,
                     std::size_t end);

// The gradient of that. With a = (input - mean) * rstd and g = grad * weight:
//
//   output = round((g - mean of g - a * mean of g * a) * rstd)
//   weight_sums = sum over the rows of grad * a
//   bias_sums = sum over the rows of grad
//
// where the mean of g is left out if not centred. output may be null, and so may both sums
// together. Sums have at most end - begin fp32 terms each: use 256 rows at most. Their earlier
// contents do not matter.
struct LayerNormGradient {
  const void* grad;
  const void* input;
  void* output;
  const float* weight;  // null for CUDA kernels: 1
  bool centred;
  const float* mean;  // null if not centred
  const float* rstd;
};
void layer_norm_gradient(const RowLayout& layout, const LayerNormGradient& work, std::size_t begin,
                         std::size_t end, float* weight_sums, float* bias_sums);

// The same for all rows. For sums over the columns, rows are split into parts of rows_of_part (at
// most 256), and `parts` receives their sums: (parts, 2, columns) of weight and bias. It may be
// null: no sums.
SEMITONE_CUDA_KERNEL(void layer_normalize_cuda(const RowLayout& layout, const LayerNormalize& work,
                                               std::size_t rows, CudaStream stream));
SEMITONE_CUDA_KERNEL(void layer_norm_gradient_cuda(const RowLayout& layout,
                                                   const LayerNormGradient& work, std::size_t rows,
                                                   std::size_t rows_of_part, float* parts,
                                                   CudaStream stream));

}  // namespace semitone::kernels
