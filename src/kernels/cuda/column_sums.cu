#include "src/kernels/cuda/launch.cuh"

namespace semitone::kernels {
namespace {

__global__ void add_up(const float* parts, std::size_t count, std::size_t size, float* sums) {
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= size) return;
  double sum = 0;
  for (std::size_t part = 0; part < count; ++part)
    sum += static_cast<double>(parts[part * size + i]);
  sums[i] = static_cast<float>(sum);
}

}  // namespace

void add_up_parts_cuda(const float* parts, std::size_t count, std::size_t size, float* sums,
                       CudaStream stream) {
  launch(stream, narrow_grid(ceil_divide(size, kThreads)), kThreads, add_up, parts, count, size,
         sums);
}

}  // namespace semitone::kernels
