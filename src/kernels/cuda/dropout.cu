#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/launch.cuh"

#include <algorithm>

namespace semitone::kernels {
namespace {

// The random numbers of neighbouring elements.
struct alignas(16) Eight {
  std::uint16_t numbers[kChunk];
};
static_assert(kDropoutGroup == kDropoutBlocks * kChunk);

template <typename In, typename Out, unsigned N>
__device__ void drop_elements(const DropoutWork& work, const std::uint16_t* numbers,
                              std::size_t i) {
  float values[N];
  float residuals[N];
  load<In>(work.input, i, values);
  if (work.residual != nullptr) load<Out>(work.residual, i, residuals);
#pragma unroll
  for (unsigned k = 0; k < N; ++k) {
    values[k] *= numbers[k] < work.threshold ? 0 : work.scale;
    if (work.residual != nullptr) values[k] = residuals[k] + values[k];
  }
  store<Out>(values, work.output, i);
}

// kDropoutBlocks threads share a group. Each computes a block of Philox, whose eight numbers belong
// to elements kDropoutBlocks apart, and gets those of eight neighbouring elements from the others.
template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads)
    drop(const __grid_constant__ DropoutWork work, std::size_t groups, bool has_chunks) {
  constexpr unsigned kGroups = kThreads / kDropoutBlocks;
  __shared__ Eight exchanged[kThreads];
  const unsigned slot = threadIdx.x / kDropoutBlocks;
  const unsigned lane = threadIdx.x % kDropoutBlocks;
  const PhiloxKey key = key_of(work.stream);
  // The same number of times for all threads of a block.
  for (std::size_t first = std::size_t{blockIdx.x} * kGroups; first < groups;
       first += std::size_t{gridDim.x} * kGroups) {
    const std::size_t group = first + slot;
    const PhiloxBlock block = philox(counter_of(work.stream, group * kDropoutBlocks + lane), key);
#pragma unroll
    for (unsigned w = 0; w < 8; ++w) {
      const unsigned number = unsigned{kDropoutBlocks} * w + lane;  // of the group
      exchanged[slot * kDropoutBlocks + number / kChunk].numbers[number % kChunk] =
          static_cast<std::uint16_t>(block[w / 2] >> (16 * (w % 2)));
    }
    __syncwarp();
    const Eight own = exchanged[threadIdx.x];
    __syncwarp();  // before the next numbers are written
    const std::size_t i = group * kDropoutGroup + lane * kChunk;
    if (has_chunks && i + kChunk <= work.size) {
      drop_elements<In, Out, kChunk>(work, own.numbers, i);
    } else {
#pragma unroll
      for (unsigned k = 0; k < kChunk; ++k)
        if (i + k < work.size) drop_elements<In, Out, 1>(work, own.numbers + k, i + k);
    }
  }
}

template <typename In, typename Out>
void drop_all(const DropoutWork& work, CudaStream stream) {
  const std::size_t groups = ceil_divide(work.size, kDropoutGroup);
  // Above this number of blocks of threads, each does more.
  constexpr std::size_t kMost = 1 << 16;
  const std::size_t blocks = ceil_divide(groups, kThreads / kDropoutBlocks);
  const Head head = Head{}
                        .add(work.input, sizeof(typename In::Stored), kChunk)
                        .add(work.residual, sizeof(typename Out::Stored), kChunk)
                        .add(work.output, sizeof(typename Out::Stored), kChunk);
  launch(stream, static_cast<unsigned>(std::min(blocks, kMost)), kThreads, drop<In, Out>, work,
         groups, head.elements() == 0);
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
