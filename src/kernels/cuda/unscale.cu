#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/tables.cuh"

#include <vector>

namespace semitone::kernels {
namespace {

struct Item {
  UnscaleSpan span;
  std::size_t head;  // elements before the first chunk
  __host__ __device__ std::size_t size() const { return span.size; }
};

__device__ bool finite(float value) {
  return value - value == 0;
}

// out = in * inv_scale + addend for N elements. Returns whether found_inf must be set.
template <typename In, typename Out, unsigned N>
__device__ bool unscale_elements(const UnscaleSpan& span, std::size_t i, float inv_scale) {
  float value[N];
  float added[N] = {};
  load<In>(span.in, i, value);
  if (span.addend != nullptr) load<Out>(span.addend, i, added);  // which out may be
  bool found = false;
#pragma unroll
  for (unsigned k = 0; k < N; ++k) {
    value[k] = value[k] * inv_scale;
    const bool overflow = !finite(value[k]);
    if (span.addend != nullptr) value[k] = value[k] + added[k];
    const bool bad = !finite(Out::wide(Out::stored(value[k])));
    found = found | overflow | (bad & finite(added[k]));
  }
  store<Out>(value, span.out, i);
  return found;
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads)
    unscale_table(const __grid_constant__ Table<Item> table, float inv_scale,
                  const float* inv_scale_on_device, float* found_inf) {
  const BlockRange range = range_of_block(table);
  const Item& item = table.items[range.item];
  if (inv_scale_on_device != nullptr) inv_scale = *inv_scale_on_device;
  bool found = false;
  for_chunks<kChunk>(range.begin, range.end, item.head, {threadIdx.x, kThreads},
                     [&](std::size_t i, auto count) {
                       constexpr unsigned kCount = decltype(count)::value;
                       const bool here = unscale_elements<In, Out, kCount>(item.span, i, inv_scale);
                       found = found || here;
                     });
  // All threads that write it write the same value.
  if (found) *found_inf = 1;
}

template <typename In, typename Out>
void unscale_formats(std::span<const UnscaleSpan> spans, float inv_scale,
                     const float* inv_scale_on_device, float* found_inf, CudaStream stream) {
  std::vector<Item> items;
  for (const UnscaleSpan& span : spans) {
    if (span.in_format != In::kFormat || span.out_format != Out::kFormat) continue;
    Head head;
    head.add(span.in, bytes_of(span.in_format), kChunk)
        .add(span.addend, bytes_of(span.out_format), kChunk)
        .add(span.out, bytes_of(span.out_format), kChunk);
    items.push_back({span, head.elements()});
  }
  for_tables<Item>(
      items.size(), [&](std::size_t i) { return items[i]; },
      [&](const Table<Item>& table, std::size_t /*first_item*/, std::size_t /*first_block*/) {
        if (blocks_of(table) == 0) return;
        launch(stream, blocks_of(table), kThreads, unscale_table<In, Out>, table, inv_scale,
               inv_scale_on_device, found_inf);
      });
}

}  // namespace

void unscale_cuda(std::span<const UnscaleSpan> spans, float inv_scale,
                  const float* inv_scale_on_device, float* found_inf, CudaStream stream) {
  unscale_formats<Fp32, Fp32>(spans, inv_scale, inv_scale_on_device, found_inf, stream);
  unscale_formats<Fp16, Fp16>(spans, inv_scale, inv_scale_on_device, found_inf, stream);
  unscale_formats<Bf16, Bf16>(spans, inv_scale, inv_scale_on_device, found_inf, stream);
  unscale_formats<Fp16, Fp32>(spans, inv_scale, inv_scale_on_device, found_inf, stream);
  unscale_formats<Bf16, Fp32>(spans, inv_scale, inv_scale_on_device, found_inf, stream);
}

}  // namespace semitone::kernels
