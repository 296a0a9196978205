#pragma once

#include "src/kernels/kernels.h"

#include <cstddef>
#include <cstdint>

// The functions on pointers behind gelu.h. Each processes a range of rows, so that threads can
// share the work.
namespace semitone::kernels {

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

// The same for all rows. For sums over the columns, rows are split into parts of rows_of_part (at
// most 256), and `parts` receives their sums, (parts, columns). It may be null: no sums.
SEMITONE_CUDA_KERNEL(void gelu_cuda(const RowLayout& layout, const Gelu& work, std::size_t rows,
                                    CudaStream stream));
SEMITONE_CUDA_KERNEL(void gelu_gradient_cuda(const RowLayout& layout, const GeluGradient& work,
                                             std::size_t rows, std::size_t rows_of_part,
                                             float* parts, CudaStream stream));

}  // namespace semitone::kernels
