#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/held.cuh"
#include "src/kernels/cuda/parts.cuh"
#include "src/kernels/cuda/squares.cuh"
#include "src/kernels/cuda/tables.cuh"

#include <vector>

namespace semitone::kernels {
namespace {

struct Item {
  NormSpan span;
  unsigned number;   // of the tensor
  std::size_t head;  // elements before the first chunk
  __host__ __device__ std::size_t size() const { return span.size; }
};

// Chunks that a thread reads before it looks at the first one.
constexpr unsigned kAtOnce = 4;

// A thread's own results, and how they are joined.
template <typename F>
class SumOfSquares {
 public:
  using Join = Plus;
  template <unsigned N>
  __device__ void add(const float (&values)[N]) {
    own_.add<F::kFormat == Format::fp32>(values);
  }
  __device__ double result() const { return own_.total(); }

 private:
  SquareSum own_;
};

template <typename F>
class LargestMagnitude {
 public:
  using Join = LargerOrNan;
  template <unsigned N>
  __device__ void add(const float (&values)[N]) {
#pragma unroll
    for (unsigned k = 0; k < N; ++k) own_ = LargerOrNan{}(own_, fabsf(values[k]));
  }
  __device__ double result() const { return static_cast<double>(own_); }

 private:
  float own_ = 0;
};

template <typename F, typename Own>
__global__ void __launch_bounds__(kThreads)
    reduce_table(const __grid_constant__ Table<Item> table, double* parts) {
  const BlockRange range = range_of_block(table);
  const Item& item = table.items[range.item];
  const std::size_t size = range.end - range.begin;
  const std::size_t before = item.head < size ? item.head : size;
  const std::size_t first = range.begin + before;
  const std::size_t chunks = (size - before) / kChunk;
  Own own;
  for (std::size_t c = threadIdx.x; c < chunks; c += kAtOnce * kThreads) {
    Held<F, kChunk> held[kAtOnce];  // zeros behind the last chunk
#pragma unroll
    for (unsigned a = 0; a < kAtOnce; ++a) {
      if (c + a * kThreads < chunks)
        held[a].load(item.span.in, first + (c + a * kThreads) * kChunk);
    }
    float values[kAtOnce * kChunk];
#pragma unroll
    for (unsigned a = 0; a < kAtOnce; ++a) {
      float of_chunk[kChunk];
      held[a].read(of_chunk);
#pragma unroll
      for (unsigned k = 0; k < kChunk; ++k) values[a * kChunk + k] = of_chunk[k];
    }
    own.add(values);
  }
  // Before the first chunk, and behind the last one: fewer than threads.
  const std::size_t single = threadIdx.x;
  if (single < size - chunks * kChunk) {
    float value[1];
    load<F>(item.span.in, range.begin + (single < before ? single : single + chunks * kChunk),
            value);
    own.add(value);
  }
  const double joined = over_block(own.result(), typename Own::Join{});
  if (threadIdx.x == 0) parts[blockIdx.x] = joined;
}

template <template <typename> typename Own>
void reduce(std::span<const NormSpan> spans, double* parts, double* results, CudaStream stream) {
  std::size_t blocks_before = 0;
  for (const Format of_tables : {Format::fp32, Format::fp16, Format::bf16}) {
    std::vector<Item> items;
    for (unsigned number = 0; number < spans.size(); ++number) {
      const NormSpan& span = spans[number];
      if (span.format != of_tables) continue;
      const std::size_t head = Head{}.add(span.in, bytes_of(span.format), kChunk).elements();
      items.push_back({span, number, head});
    }
    for_tables<Item>(
        items.size(), [&](std::size_t i) { return items[i]; },
        [&](const Table<Item>& table, std::size_t /*first_item*/, std::size_t first_block) {
          double* const of_table = parts + blocks_before + first_block;
          if (blocks_of(table) > 0) {
            with_format(of_tables, [&](auto format) {
              using F = decltype(format);
              launch(stream, blocks_of(table), kThreads, reduce_table<F, Own<F>>, table, of_table);
            });
          }
          join_parts_of(table, 1, of_table, results, typename Own<Fp32>::Join{}, stream);
        });
    for (const Item& item : items) blocks_before += cuda_blocks(item.size());
  }
}

}  // namespace

void sums_of_squares_cuda(std::span<const NormSpan> spans, double* parts, double* results,
                          CudaStream stream) {
  reduce<SumOfSquares>(spans, parts, results, stream);
}

void max_magnitudes_cuda(std::span<const NormSpan> spans, double* parts, double* results,
                         CudaStream stream) {
  reduce<LargestMagnitude>(spans, parts, results, stream);
}

}  // namespace semitone::kernels
