#pragma once

#include "src/kernels/cuda/launch.cuh"
#include "src/kernels/cuda/reduce.cuh"
#include "src/kernels/cuda/tables.cuh"

#include <cuda_runtime.h>

#include <cstddef>

// The second stage of a reduction over many tensors: combines the results of blocks into those of
// tensors.
namespace semitone::kernels {

// For each tensor: the first of its blocks' results, their number, and the tensor's own number.
struct PartRange {
  unsigned first;
  unsigned count;
  unsigned tensor;
};
struct PartRanges {
  PartRange ranges[kMostItems];
};

// One block per tensor and value. A block's results are `values` neighbouring numbers, and so are a
// tensor's.
template <typename Join>
__global__ void join_parts(const __grid_constant__ PartRanges tensors, unsigned values,
                           const double* parts, double* results, Join join) {
  const PartRange range = tensors.ranges[blockIdx.x];
  const unsigned value = blockIdx.y;
  double joined = 0;
  for (unsigned i = threadIdx.x; i < range.count; i += blockDim.x)
    joined = join(joined, parts[(std::size_t{range.first} + i) * values + value]);
  joined = over_block(joined, join);
  if (threadIdx.x == 0) results[std::size_t{range.tensor} * values + value] = joined;
}

// Item must have the `number` of its tensor.
template <typename Item, typename Join>
void join_parts_of(const Table<Item>& table, unsigned values, const double* parts, double* results,
                   const Join& join, CudaStream stream) {
  PartRanges tensors{};
  for (unsigned i = 0; i < table.count; ++i)
    tensors.ranges[i] = {table.first_block[i], table.first_block[i + 1] - table.first_block[i],
                         table.items[i].number};
  launch(stream, dim3(table.count, values), kThreads, join_parts<Join>, tensors, values, parts,
         results, join);
}

}  // namespace semitone::kernels
