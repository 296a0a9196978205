#include "src/kernels/cuda/launch.cuh"
#include "src/kernels/cuda/reduce.cuh"

namespace semitone::kernels {
namespace {

// A block has kAcross neighbouring columns, 32 bytes of each part. The threads of a column share the
// parts, and their sums are added pairwise.
constexpr unsigned kAcross = 8;
constexpr unsigned kDown = kThreads / kAcross;
constexpr unsigned kAtOnce = 4;

__global__ void __launch_bounds__(kThreads)
    add_up(const float* parts, std::size_t count, std::size_t size, float* sums) {
  const std::size_t i = std::size_t{blockIdx.x} * kAcross + threadIdx.x % kAcross;
  PairSum own;
  if (i < size) {
    for (std::size_t part = threadIdx.x / kAcross; part < count; part += kAtOnce * kDown) {
      float values[kAtOnce] = {};
#pragma unroll
      for (unsigned a = 0; a < kAtOnce; ++a)
        if (part + a * kDown < count) values[a] = parts[(part + a * kDown) * size + i];
      own.add(sum_of(values));
    }
  }
  double sum[1] = {own.total()};
  sum_columns(sum, kAcross);
  if (threadIdx.x < kAcross && i < size) sums[i] = static_cast<float>(sum[0]);
}

}  // namespace

void add_up_parts_cuda(const float* parts, std::size_t count, std::size_t size, float* sums,
                       CudaStream stream) {
  launch(stream, narrow_grid(ceil_divide(size, kAcross)), kThreads, add_up, parts, count, size,
         sums);
}

}  // namespace semitone::kernels
