#pragma once

#include "src/kernels/kernels.h"

#include <cstddef>
#include <cstdint>

// The functions on pointers behind cross_entropy.h. Each processes a range of rows, so that threads
// can share the work.
namespace semitone::kernels {

struct CrossEntropyRows {
  const void* logits;  // of row i: `classes` values from logits + i * stride on
  Format format;
  std::size_t stride;  // in elements
  std::size_t classes;
  const std::int64_t* target;  // a class, or ignore_index
  std::int64_t ignore_index;
  double label_smoothing;
};

// For row i: its loss, its largest logit, and 1 / the sum of exp(logit - largest).
struct CrossEntropyResults {
  float* loss;
  float* max;
  float* inv_sum;
};

// Computes rows [begin, end); zeros for ignored rows. Exponentials and their products are in fp32.
// Sums are accumulated in fp32 for at most 256 terms at a time, and these partial sums are added in
// fp64.
void cross_entropy_rows(const CrossEntropyRows& rows, const CrossEntropyResults& results,
                        std::size_t begin, std::size_t end);

struct CrossEntropyGradient {
  const float* max;
  const float* inv_sum;
  const float* grad;      // of the loss of row i: grad[i * grad_step]
  std::size_t grad_step;  // 1, or 0 where all rows have the same
  void* output;           // in the logits' format; may be the logits
  std::size_t stride;     // of the output
};

// output = round((softmax - target's probability) * grad); zeros for ignored rows.
void cross_entropy_gradient_rows(const CrossEntropyRows& rows, const CrossEntropyGradient& work,
                                 std::size_t begin, std::size_t end);

// The same for `count` rows. Targets need not have been checked: for an invalid one, the row's
// results and gradients are NaN.
SEMITONE_CUDA_KERNEL(void cross_entropy_cuda(const CrossEntropyRows& rows,
                                             const CrossEntropyResults& results, std::size_t count,
                                             CudaStream stream));
SEMITONE_CUDA_KERNEL(void cross_entropy_gradient_cuda(const CrossEntropyRows& rows,
                                                      const CrossEntropyGradient& work,
                                                      std::size_t count, CudaStream stream));

}  // namespace semitone::kernels
