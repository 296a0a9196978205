#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/tables.cuh"

namespace semitone::kernels {
namespace {

struct Item {
  UnscaleSpan span;
  __host__ __device__ std::size_t size() const { return span.size; }
};

__device__ bool finite(float value) {
  return value - value == 0;
}

// out = in * inv_scale + addend. Returns whether found_inf must be set.
template <typename Out>
__device__ bool unscale_element(const UnscaleSpan& span, std::size_t i, float inv_scale) {
  const float product = load(span.in_format, span.in, i) * inv_scale;
  if (span.addend == nullptr) {
    store<Out>(product, span.out, i);
    return !finite(load<Out>(span.out, i));
  }
  const float added = load<Out>(span.addend, i);  // before out, which may be the same, is written
  store<Out>(product + added, span.out, i);
  return !finite(product) || (finite(added) && !finite(load<Out>(span.out, i)));
}

template <typename Out>
__device__ bool unscale_range(const UnscaleSpan& span, const BlockRange& range, float inv_scale) {
  bool found = false;
  for (std::size_t i = range.begin + threadIdx.x; i < range.end; i += kThreads)
    found = unscale_element<Out>(span, i, inv_scale) || found;
  return found;
}

__global__ void unscale_table(const __grid_constant__ Table<Item> table, float inv_scale,
                              const float* inv_scale_on_device, float* found_inf) {
  const BlockRange range = range_of_block(table);
  const UnscaleSpan& span = table.items[range.item].span;
  if (inv_scale_on_device != nullptr) inv_scale = *inv_scale_on_device;
  bool found = false;
  switch (span.out_format) {
    case Format::fp32:
      found = unscale_range<Fp32>(span, range, inv_scale);
      break;
    case Format::fp16:
      found = unscale_range<Fp16>(span, range, inv_scale);
      break;
    case Format::bf16:
      found = unscale_range<Bf16>(span, range, inv_scale);
      break;
  }
  // All threads that write it write the same value.
  if (found) *found_inf = 1;
}

}  // namespace

void unscale_cuda(std::span<const UnscaleSpan> spans, float inv_scale,
                  const float* inv_scale_on_device, float* found_inf, CudaStream stream) {
  for_tables<Item>(
      spans.size(), [&](std::size_t i) { return Item{spans[i]}; },
      [&](const Table<Item>& table, std::size_t, std::size_t) {
        if (blocks_of(table) == 0) return;
        launch(stream, blocks_of(table), kThreads, unscale_table, table, inv_scale,
               inv_scale_on_device, found_inf);
      });
}

}  // namespace semitone::kernels
