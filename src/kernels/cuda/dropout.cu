#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/held.cuh"
#include "src/kernels/cuda/launch.cuh"

#include <algorithm>

namespace semitone::kernels {
namespace {

// A warp shares two groups. Each thread computes a block of Philox, whose eight numbers belong to
// elements kDropoutBlocks apart, and gets those of eight neighbouring elements from the others:
// from the same word of eight blocks, and the same half of it.
constexpr unsigned kWords = 4;
static_assert(kDropoutGroup == kDropoutBlocks * kChunk && kWarp == 2 * kDropoutBlocks &&
              kDropoutBlocks == kWords * 4);

// The words of a warp's blocks, four to an access. Rows are 16 bytes apart modulo 128, so that
// threads that read at the same time read from different banks.
struct alignas(16) Four {
  std::uint32_t words[4];
};
struct Exchange {
  Four rows[kWords][kWarp / 4 + 1];
};

// A thread's random numbers, in the upper halves of words. The lower ones are anything.
struct Numbers {
  std::uint32_t words[kChunk];
};

__device__ Numbers numbers_of(const PhiloxStream& stream, std::size_t group, unsigned lane,
                              Exchange& exchange) {
  const unsigned place = threadIdx.x % kWarp;
  const PhiloxBlock block =
      philox(counter_of(stream, group * kDropoutBlocks + lane), key_of(stream));
#pragma unroll
  for (unsigned w = 0; w < kWords; ++w) exchange.rows[w][place / 4].words[place % 4] = block[w];
  __syncwarp();
  const Four* const row = exchange.rows[lane / 4] + (place - lane) / 4 + lane % 2 * 2;
  const Four own[2] = {row[0], row[1]};
  __syncwarp();  // before the next words are written
  Numbers numbers;
#pragma unroll
  for (unsigned k = 0; k < kChunk; ++k) numbers.words[k] = own[k / 4].words[k % 4];
  const bool is_lower = lane / 2 % 2 == 0;
#pragma unroll
  for (std::uint32_t& word : numbers.words) word <<= is_lower ? 16 : 0;
  return numbers;
}

// N elements: what is read for them, and what is written. `threshold` is that of the upper halves of
// words.
template <typename In, typename Out, unsigned N>
class Elements {
 public:
  __device__ void load_from(const DropoutWork& work, std::size_t i) {
    values_.load(work.input, i);
    if (work.residual != nullptr) residuals_.load(work.residual, i);
  }
  __device__ void store_to(const DropoutWork& work, std::size_t i, const std::uint32_t* words,
                           std::uint32_t threshold) const {
    float values[N];
    float residuals[N];
    values_.read(values);
    residuals_.read(residuals);
#pragma unroll
    for (unsigned k = 0; k < N; ++k) {
      values[k] *= words[k] < threshold ? 0 : work.scale;
      if (work.residual != nullptr) values[k] = residuals[k] + values[k];
    }
    store<Out>(values, work.output, i);
  }

 private:
  Held<In, N> values_;
  Held<Out, N> residuals_;
};

// The first `whole` groups in chunks, and the others one element at a time. The threads of a warp
// compute numbers together, also those whose group is behind the last one.
template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads)
    drop(const __grid_constant__ DropoutWork work, std::size_t whole, std::size_t groups) {
  constexpr unsigned kGroups = kThreads / kDropoutBlocks;
  __shared__ Exchange exchanges[kThreads / kWarp];
  Exchange& exchange = exchanges[threadIdx.x / kWarp];
  const unsigned lane = threadIdx.x % kDropoutBlocks;
  const std::uint32_t threshold = work.threshold << 16;
  const std::size_t step = std::size_t{gridDim.x} * kGroups;
  const std::size_t first = std::size_t{blockIdx.x} * kGroups + threadIdx.x / kDropoutBlocks;
  const std::size_t first_of_warp = first / 2 * 2;
  for (std::size_t from = first_of_warp; from < whole; from += step) {
    const std::size_t group = from + first % 2;
    const std::size_t i = group * kDropoutGroup + lane * kChunk;
    Elements<In, Out, kChunk> elements;
    if (group < whole) elements.load_from(work, i);  // they arrive while numbers are computed
    const Numbers numbers = numbers_of(work.stream, group, lane, exchange);
    if (group < whole) elements.store_to(work, i, numbers.words, threshold);
  }
  for (std::size_t from = whole + first_of_warp; from < groups; from += step) {
    const std::size_t group = from + first % 2;
    const std::size_t begin = group * kDropoutGroup + lane * kChunk;
    const Numbers numbers = numbers_of(work.stream, group, lane, exchange);
#pragma unroll
    for (unsigned k = 0; k < kChunk; ++k) {
      if (begin + k >= work.size) continue;
      Elements<In, Out, 1> element;
      element.load_from(work, begin + k);
      element.store_to(work, begin + k, numbers.words + k, threshold);
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
  const std::size_t whole = head.elements() == 0 ? work.size / kDropoutGroup : 0;
  launch(stream, static_cast<unsigned>(std::min(blocks, kMost)), kThreads, drop<In, Out>, work,
         whole, groups);
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
