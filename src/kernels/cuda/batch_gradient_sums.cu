#include "src/kernels/cuda/batch_tiles.cuh"
#include "src/kernels/cuda/held.cuh"
#include "src/kernels/cuda/reduce.cuh"

#include <cstddef>
#include <type_traits>

namespace semitone::kernels {
namespace {

// Where gradients count: everywhere, or where relu's result is positive or NaN. That is computed
// again, or, with a residual, read.
enum class Mask { none, computed, read };

// What is needed of a channel.
template <Mask kMask>
struct Numbers {
  float mean = 0;
  float scale = 0;
  float shift = 0;

  __device__ void load(const BatchGradient& work, std::size_t channel) {
    mean = work.mean[channel];
    if (kMask != Mask::computed) return;
    scale = work.a[channel];
    shift = work.shift[channel];
  }
};

struct Sums {
  float grad = 0;
  float centred = 0;

  // An element's gradient, or 0 where relu stopped it.
  template <Mask kMask>
  __device__ void add(const Numbers<kMask>& numbers, float value, float& grad_of, float result,
                      float vanishing) {
    const float away = value - numbers.mean;
    if (kMask == Mask::computed && away * numbers.scale + numbers.shift <= vanishing) grad_of = 0;
    if (kMask == Mask::read && result <= 0) grad_of = 0;
    grad += grad_of;
    centred = fmaf(grad_of, away, centred);
  }
};

// The elements of a chunk in all tensors.
template <typename F, unsigned N, Mask kMask>
struct Chunk {
  Held<F, N> input;
  Held<F, N> grad;
  Held<F, kMask == Mask::read ? N : 1> result;

  __device__ void load(const BatchGradient& work, std::size_t i) {
    input.load(work.input, i);
    grad.load(work.grad, i);
    if constexpr (kMask == Mask::read) result.load(work.result, i);
  }
  __device__ void read(float (&x)[N], float (&g)[N], float (&y)[N]) const {
    input.read(x);
    grad.read(g);
    if constexpr (kMask == Mask::read) result.read(y);
  }
};

// Chunks that a thread reads at once: of two or three tensors.
template <typename F, unsigned N>
constexpr unsigned kGradientsAtOnce = kAtOnce<F, N> / 2;

// parts: (parts, 2, channels).
template <typename F, unsigned N, Mask kMask>
__global__ void __launch_bounds__(kThreads)
    gradients_of_rows(const __grid_constant__ RowTiles tiles,
                      const __grid_constant__ BatchGradient work, float vanishing, double* parts) {
  const std::size_t channel = tiles.channel<N>();
  Numbers<kMask> numbers[N];
  if (channel < tiles.channels) {
#pragma unroll
    for (unsigned k = 0; k < N; ++k) numbers[k].load(work, channel + k);
  }
  Sums own[N];
  for_rows<kGradientsAtOnce<F, N>>(tiles, channel, [&](std::size_t i, std::size_t step, auto rows) {
    constexpr unsigned kRows = decltype(rows)::value;
    Chunk<F, N, kMask> chunks[kRows];
#pragma unroll
    for (unsigned r = 0; r < kRows; ++r) chunks[r].load(work, i + r * step);
#pragma unroll
    for (unsigned r = 0; r < kRows; ++r) {
      float x[N];
      float g[N];
      float y[N] = {};
      chunks[r].read(x, g, y);
#pragma unroll
      for (unsigned k = 0; k < N; ++k) own[k].add(numbers[k], x[k], g[k], y[k], vanishing);
      if constexpr (kMask == Mask::read) store<F>(g, work.masked, i + r * step);
    }
  });
  double* const results = parts + std::size_t{blockIdx.x} * 2 * tiles.channels + channel;
  const bool writes = threadIdx.x < tiles.across && channel < tiles.channels;
  double sums[N];
#pragma unroll
  for (unsigned k = 0; k < N; ++k) sums[k] = static_cast<double>(own[k].grad);
  sum_columns(sums, tiles.across);
#pragma unroll
  for (unsigned k = 0; k < N; ++k) {
    if (writes) results[k] = sums[k];
    sums[k] = static_cast<double>(own[k].centred);
  }
  sum_columns(sums, tiles.across);
#pragma unroll
  for (unsigned k = 0; k < N; ++k)
    if (writes) results[tiles.channels + k] = sums[k];
}

// Those of a chunk's elements that are in the mask.
template <typename F, unsigned N>
__device__ void store_some(const float (&values)[N], unsigned mask, void* to, std::size_t i) {
  if (mask == (1U << N) - 1) {
    store<F>(values, to, i);
    return;
  }
#pragma unroll
  for (unsigned k = 0; k < N; ++k)
    if ((mask >> k & 1) != 0) store<F>(values[k], to, i + k);
}

template <typename F, unsigned N, Mask kMask>
__global__ void __launch_bounds__(kThreads)
    gradients_of_planes(const __grid_constant__ PlaneTiles tiles,
                        const __grid_constant__ BatchGradient work, float vanishing,
                        double* parts) {
  constexpr unsigned kMost = kGradientsAtOnce<F, N>;
  PlaneChunks<N> places(tiles);
  const std::size_t channel = tiles.channel();
  Numbers<kMask> numbers;
  if (channel < tiles.channels) numbers.load(work, channel);
  Sums own;
  while (!places.done()) {
    Chunk<F, N, kMask> chunks[kMost];
    unsigned mask[kMost];
    std::size_t at[kMost];
#pragma unroll
    for (unsigned v = 0; v < kMost; ++v) {
      mask[v] = places.mask();
      at[v] = places.at();
      if (mask[v] != 0) chunks[v].load(work, at[v]);
      places.advance();
    }
#pragma unroll
    for (unsigned v = 0; v < kMost; ++v) {
      float x[N];
      float g[N];
      float y[N] = {};
      chunks[v].read(x, g, y);
#pragma unroll
      for (unsigned k = 0; k < N; ++k) {
        const bool counts = (mask[v] >> k & 1) != 0;
        if (!counts) g[k] = 0;
        own.add(numbers, counts ? x[k] : numbers.mean, g[k], y[k], vanishing);
      }
      if constexpr (kMask == Mask::read) store_some<F>(g, mask[v], work.masked, at[v]);
    }
  }
  const double grad = sum_of_lanes(static_cast<double>(own.grad), tiles.lanes);
  const double centred = sum_of_lanes(static_cast<double>(own.centred), tiles.lanes);
  if (threadIdx.x % tiles.lanes != 0 || channel >= tiles.channels) return;
  double* const results = parts + std::size_t{blockIdx.x} * 2 * tiles.channels + channel;
  results[0] = grad;
  results[tiles.channels] = centred;
}

template <Mask kMask>
std::size_t sum_gradients(const BatchLayout& layout, const BatchGradient& work, std::size_t pieces,
                          double* parts, CudaStream stream) {
  const std::size_t bytes = bytes_of(layout.format);
  const Head head = Head{}
                        .add(work.input, bytes, kChunk)
                        .add(work.grad, bytes, kChunk)
                        .add(work.result, bytes, kChunk)
                        .add(work.masked, bytes, kChunk);
  std::size_t count = 0;
  with_tiles(layout, pieces, head, [&](auto format, auto chunk, const auto& tiles) {
    using F = decltype(format);
    constexpr unsigned kCount = decltype(chunk)::value;
    count = tiles.parts();
    const float zero = vanishing(layout.format);
    if constexpr (std::is_same_v<std::decay_t<decltype(tiles)>, RowTiles>) {
      launch(stream, grid_of(tiles, kCount), kThreads, gradients_of_rows<F, kCount, kMask>, tiles,
             work, zero, parts);
    } else {
      launch(stream, grid_of(tiles), kThreads, gradients_of_planes<F, kCount, kMask>, tiles, work,
             zero, parts);
    }
  });
  return count;
}

}  // namespace

std::size_t batch_gradient_sums_cuda(const BatchLayout& layout, const BatchGradient& work,
                                     std::size_t pieces, double* parts, CudaStream stream) {
  if (work.result != nullptr) return sum_gradients<Mask::read>(layout, work, pieces, parts, stream);
  if (work.shift != nullptr)
    return sum_gradients<Mask::computed>(layout, work, pieces, parts, stream);
  return sum_gradients<Mask::none>(layout, work, pieces, parts, stream);
}

}  // namespace semitone::kernels
