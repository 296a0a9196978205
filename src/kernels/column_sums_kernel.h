#pragma once

#include "src/kernels/kernels.h"

#include <cstddef>

// The function on pointers behind parallel_rows.h: joins the sums of parts of a matrix.
namespace semitone::kernels {

// sums[i] = parts[i] + parts[size + i] + ... (count of them), added up in this order in fp64.
void add_up_parts(const float* parts, std::size_t count, std::size_t size, std::size_t begin,
                  std::size_t end, float* sums);

// The same for all i < size, added up in fp64 in an order that depends only on their count.
SEMITONE_CUDA_KERNEL(void add_up_parts_cuda(const float* parts, std::size_t count, std::size_t size,
                                            float* sums, CudaStream stream));

}  // namespace semitone::kernels
