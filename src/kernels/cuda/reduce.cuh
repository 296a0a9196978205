#pragma once

#include "src/kernels/cuda/launch.cuh"

#include <cuda_runtime.h>

// Sums and maxima over threads, in an order that depends only on the size of a block. Every thread
// of a block must take part, and every thread of a group gets the result.
namespace semitone::kernels {

struct Plus {
  __device__ double operator()(double a, double b) const { return a + b; }
};

// The maximum, or NaN if one is NaN.
struct LargerOrNan {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return b > a || b != b ? b : a;
  }
};

// The maximum, or the other number if one is NaN.
struct LargerNumber {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return b > a || a != a ? b : a;
  }
};

template <typename T, typename Join>
__device__ T over_warp(T value, const Join& join) {
  for (int away = kWarp / 2; away > 0; away /= 2)
    value = join(value, __shfl_xor_sync(0xFFFFFFFFU, value, away));
  return value;
}

// Over a block of whole warps.
template <typename T, typename Join>
__device__ T over_block(T value, const Join& join) {
  __shared__ T of_warp[kThreads / kWarp];
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
  const unsigned warps = blockDim.x * blockDim.y / kWarp;
  value = over_warp(value, join);
  __syncthreads();  // what the last call has left may still be read
  if (thread % kWarp == 0) of_warp[thread / kWarp] = value;
  __syncthreads();
  T result = of_warp[0];
  for (unsigned warp = 1; warp < warps; ++warp) result = join(result, of_warp[warp]);
  return result;
}

// Pairwise.
template <unsigned N>
__device__ float sum_of(const float (&values)[N]) {
  float sums[N];
#pragma unroll
  for (unsigned k = 0; k < N; ++k) sums[k] = values[k];
#pragma unroll
  for (unsigned away = N / 2; away > 0; away /= 2) {
#pragma unroll
    for (unsigned k = 0; k < away; ++k) sums[k] += sums[k + away];
  }
  return sums[0];
}

// Over a block of kThreads, of a number that each warp has in all of its threads.
__device__ inline double sum_of_warps(double value) {
  __shared__ double of_warp[kThreads / kWarp];
  __syncthreads();  // what the last call has left may still be read
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  double sum = of_warp[0];
  for (unsigned warp = 1; warp < kThreads / kWarp; ++warp) sum += of_warp[warp];
  return sum;
}

__device__ inline double block_sum(double value) {
  return over_block(value, Plus{});
}

// Over the threads of a (kWarp, kTileRows) block that have the same threadIdx.x.
__device__ inline double column_sum(double value) {
  __shared__ double values[kTileRows][kWarp];
  __syncthreads();
  values[threadIdx.y][threadIdx.x] = value;
  __syncthreads();
  double sum = 0;
  for (unsigned row = 0; row < kTileRows; ++row) sum += values[row][threadIdx.x];
  return sum;
}

// A thread's own sum.
class WideSum {
 public:
  // The sum of some terms.
  __device__ void add(float value, int terms = 1) {
    part_ += value;
    terms_ += terms;
    if (terms_ >= kTerms) flush();
  }
  __device__ void scale(float factor) {
    part_ *= factor;
    total_ *= static_cast<double>(factor);
  }
  __device__ double total() {
    flush();
    return total_;
  }

 private:
  __device__ void flush() {
    total_ += static_cast<double>(part_);
    part_ = 0;
    terms_ = 0;
  }

  double total_ = 0;
  float part_ = 0;
  int terms_ = 0;
};

}  // namespace semitone::kernels
