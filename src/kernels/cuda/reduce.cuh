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

// Of a block of kThreads in which every `across` neighbours have different columns, N each, and the
// threads behind them the same columns again: finish(sum over a column), in all of its threads.
// Pairwise, and the last eight in a row. `across` is a power of two, and at most kWarp.
template <unsigned N, typename Finish>
__device__ void sum_columns(double (&values)[N], unsigned across, const Finish& finish) {
  static_assert(N * kWarp <= kThreads);
  __shared__ double sums[N][kThreads];
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
  __syncthreads();  // what the last call has left may still be read
#pragma unroll
  for (unsigned k = 0; k < N; ++k) sums[k][thread] = values[k];
  constexpr unsigned kInRow = kThreads / kWarp;
  for (unsigned half = kThreads / 2; half >= kInRow * across; half /= 2) {
    __syncthreads();
    if (thread < half) {
#pragma unroll
      for (unsigned k = 0; k < N; ++k) sums[k][thread] += sums[k][thread + half];
    }
  }
  __syncthreads();
  if (thread < N * across) {  // a thread for each sum
    double* const of_column = sums[thread / across] + thread % across;
    double sum = of_column[0];
#pragma unroll
    for (unsigned row = 1; row < kInRow; ++row) sum += of_column[row * across];
    of_column[0] = finish(sum);
  }
  __syncthreads();
#pragma unroll
  for (unsigned k = 0; k < N; ++k) values[k] = sums[k][thread % across];
}

template <unsigned N>
__device__ void sum_columns(double (&values)[N], unsigned across) {
  sum_columns(values, across, [](double sum) { return sum; });
}

// A thread's own sum: of two fp32 numbers, the second of which has what the first one loses when it
// is rounded. It is off by at most 2^-23 of the sum of the terms' sizes, for up to 4096 terms.
class PairSum {
 public:
  __device__ void add(float value) {
    const float sum = sum_ + value;
    rest_ += value - (sum - sum_);
    sum_ = sum;
  }
  __device__ void scale(float factor) {
    sum_ *= factor;
    rest_ *= factor;
  }
  // An infinite sum has no rest.
  __device__ double total() const {
    const double sum = static_cast<double>(sum_);
    return sum_ - sum_ == 0 ? sum + static_cast<double>(rest_) : sum;
  }

 private:
  float sum_ = 0;
  float rest_ = 0;
};

}  // namespace semitone::kernels
