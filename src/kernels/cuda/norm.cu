#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/parts.cuh"
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

// The result with one more element. The square of an fp32 number is exact in fp64: fusing the
// operations changes no bit.
struct SumOfSquares : Plus {
  static __device__ double with(double sum, float value) {
    return fma(static_cast<double>(value), static_cast<double>(value), sum);
  }
};
struct LargestMagnitude : LargerOrNan {
  static __device__ float with(float largest, float value) {
    return LargerOrNan{}(largest, fabsf(value));
  }
};

template <typename F, typename Join>
__global__ void __launch_bounds__(kThreads)
    reduce_table(const __grid_constant__ Table<Item> table, double* parts, Join join) {
  const BlockRange range = range_of_block(table);
  const Item& item = table.items[range.item];
  decltype(Join::with(0, 0)) own = 0;
  for_chunks<kChunk>(range.begin, range.end, item.head, {threadIdx.x, kThreads},
                     [&](std::size_t i, auto count) {
                       float value[decltype(count)::value];
                       load<F>(item.span.in, i, value);
#pragma unroll
                       for (unsigned k = 0; k < decltype(count)::value; ++k)
                         own = Join::with(own, value[k]);
                     });
  const double joined = over_block(static_cast<double>(own), join);
  if (threadIdx.x == 0) parts[blockIdx.x] = joined;
}

template <typename Join>
void reduce(std::span<const NormSpan> spans, double* parts, double* results, const Join& join,
            CudaStream stream) {
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
              launch(stream, blocks_of(table), kThreads, reduce_table<decltype(format), Join>,
                     table, of_table, join);
            });
          }
          join_parts_of(table, 1, of_table, results, join, stream);
        });
    for (const Item& item : items) blocks_before += cuda_blocks(item.size());
  }
}

}  // namespace

void sums_of_squares_cuda(std::span<const NormSpan> spans, double* parts, double* results,
                          CudaStream stream) {
  reduce(spans, parts, results, SumOfSquares{}, stream);
}

void max_magnitudes_cuda(std::span<const NormSpan> spans, double* parts, double* results,
                         CudaStream stream) {
  reduce(spans, parts, results, LargestMagnitude{}, stream);
}

}  // namespace semitone::kernels
