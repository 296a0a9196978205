#pragma once

#include "src/kernels/kernels.h"

#include <cstddef>

// The functions on pointers behind row_norm.h and gelu.h. Each processes a range of rows of a
// matrix, so that threads can share the work. Rows follow each other without gaps.
namespace semitone::kernels {

struct RowLayout {
  Format format;
  std::size_t columns;
};

// output = round((input - mean) * rstd * weight + bias), where mean is the row's mean if centred is
// set, else 0, and rstd = 1 / sqrt(mean of (input - mean)^2 + eps).
struct RowNormalize {
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
void row_normalize(const RowLayout& layout, const RowNormalize& work, std::size_t begin,
                   std::size_t end);

// The gradient of that. With a = (input - mean) * rstd and g = grad * weight:
//
//   output = round((g - mean of g - a * mean of g * a) * rstd)    (without mean of g if not
//   centred) weight_sums = sum over the rows of grad * a
//   bias_sums = sum over the rows of grad
//
// output may be null, and so may both sums together. Sums have at most end - begin fp32 terms each:
// use 256 rows at most. Their earlier contents do not matter.
struct RowNormGradient {
  const void* grad;
  const void* input;
  void* output;
  const float* weight;  // null for CUDA kernels: 1
  bool centred;
  const float* mean;  // null if not centred
  const float* rstd;
};
void row_norm_gradient(const RowLayout& layout, const RowNormGradient& work, std::size_t begin,
                       std::size_t end, float* weight_sums, float* bias_sums);

// The Gaussian error linear unit of z = input + bias:
//
//   erf:   z * P, P the probability that a standard normal variable is below z
//   tanh:  z / 2 * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 * z^3)))
//
// bias has a value for each column, or is null.
enum class GeluForm : std::uint8_t { erf, tanh };
struct Gelu {
  GeluForm form;
  const void* input;
  const float* bias;
  void* output;
};
void gelu(const RowLayout& layout, const Gelu& work, std::size_t begin, std::size_t end);

// output = round(grad * dGELU/dz); sums, of at most end - begin fp32 terms, may be null.
struct GeluGradient {
  GeluForm form;
  const void* grad;
  const void* input;
  const float* bias;
  void* output;
};
void gelu_gradient(const RowLayout& layout, const GeluGradient& work, std::size_t begin,
                   std::size_t end, float* sums);

// sums[i] = parts[i] + parts[size + i] + ... (count of them), added up in this order in fp64.
void add_up_parts(const float* parts, std::size_t count, std::size_t size, std::size_t begin,
                  std::size_t end, float* sums);

}  // namespace semitone::kernels
