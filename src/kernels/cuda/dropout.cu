#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/launch.cuh"

#include <algorithm>

namespace semitone::kernels {
namespace {

// A thread computes a block of Philox, whose eight numbers belong to elements kDropoutBlocks apart,
// so that sixteen threads read sixteen neighbours.
template <typename In, typename Out>
__global__ void drop(const __grid_constant__ DropoutWork work, std::uint64_t philox_blocks) {
  const PhiloxKey key = key_of(work.stream);
  const std::uint64_t step = std::uint64_t{gridDim.x} * kThreads;
  for (std::uint64_t number = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x;
       number < philox_blocks; number += step) {
    const PhiloxBlock block = philox(counter_of(work.stream, number), key);
    const std::size_t first = number / kDropoutBlocks * kDropoutGroup + number % kDropoutBlocks;
#pragma unroll
    for (unsigned w = 0; w < 8; ++w) {
      const std::size_t i = first + kDropoutBlocks * w;
      if (i >= work.size) break;
      const std::uint32_t random = (block[w / 2] >> (16 * (w % 2))) & 0xFFFF;
      float v = load<In>(work.input, i) * (random < work.threshold ? 0 : work.scale);
      if (work.residual != nullptr) v = load<Out>(work.residual, i) + v;
      store<Out>(v, work.output, i);
    }
  }
}

template <typename In, typename Out>
void drop_all(const DropoutWork& work, CudaStream stream) {
  const std::uint64_t blocks = ceil_divide(work.size, kDropoutGroup) * kDropoutBlocks;
  // Above this number of blocks of threads, each does more.
  constexpr std::size_t kMost = 1 << 16;
  const auto grid = static_cast<unsigned>(std::min(ceil_divide(blocks, kThreads), kMost));
  launch(stream, grid, kThreads, drop<In, Out>, work, blocks);
}

}  // namespace

void dropout_cuda(const DropoutWork& work, CudaStream stream) {
  if (work.input_format == work.output_format) {
    with_format(work.input_format,
                [&](auto format) { drop_all<decltype(format), decltype(format)>(work, stream); });
  } else if (work.output_format == Format::fp32) {
    with_format(work.input_format,
                [&](auto format) { drop_all<decltype(format), Fp32>(work, stream); });
  } else {
    with_format(work.output_format,
                [&](auto format) { drop_all<Fp32, decltype(format)>(work, stream); });
  }
}

}  // namespace semitone::kernels
