#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/parts.cuh"
#include "src/kernels/cuda/tables.cuh"

namespace semitone::kernels {
namespace {

struct Item {
  NormSpan span;
  __host__ __device__ std::size_t size() const { return span.size; }
};

// The contribution of an element to the result.
struct Square {
  __device__ double operator()(float value) const {
    return static_cast<double>(value) * static_cast<double>(value);
  }
};
struct Magnitude {
  __device__ double operator()(float value) const { return static_cast<double>(fabsf(value)); }
};

template <typename Of, typename Join>
__global__ void reduce_table(const __grid_constant__ Table<Item> table, double* parts, Of of,
                             Join join) {
  const BlockRange range = range_of_block(table);
  const NormSpan& span = table.items[range.item].span;
  double joined = 0;
  for (std::size_t i = range.begin + threadIdx.x; i < range.end; i += kThreads)
    joined = join(joined, of(load(span.format, span.in, i)));
  joined = over_block(joined, join);
  if (threadIdx.x == 0) parts[blockIdx.x] = joined;
}

template <typename Of, typename Join>
void reduce(std::span<const NormSpan> spans, double* parts, double* results, const Of& of,
            const Join& join, CudaStream stream) {
  for_tables<Item>(
      spans.size(), [&](std::size_t i) { return Item{spans[i]}; },
      [&](const Table<Item>& table, std::size_t first_item, std::size_t first_block) {
        if (blocks_of(table) > 0) {
          launch(stream, blocks_of(table), kThreads, reduce_table<Of, Join>, table,
                 parts + first_block, of, join);
        }
        join_parts_of(table, 1, parts + first_block, results + first_item, join, stream);
      });
}

}  // namespace

void sums_of_squares_cuda(std::span<const NormSpan> spans, double* parts, double* results,
                          CudaStream stream) {
  reduce(spans, parts, results, Square{}, Plus{}, stream);
}

void max_magnitudes_cuda(std::span<const NormSpan> spans, double* parts, double* results,
                         CudaStream stream) {
  reduce(spans, parts, results, Magnitude{}, LargerOrNan{}, stream);
}

}  // namespace semitone::kernels
