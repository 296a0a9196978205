#include "src/kernels/cuda/batch_tiles.cuh"
#include "src/kernels/cuda/held.cuh"
#include "src/kernels/cuda/reduce.cuh"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <type_traits>

namespace semitone::kernels {
namespace {

// Sums in fp32 of the distances from an anchor, which is the mean of a thread's first values. If
// that are m of its n values, their sum of squared deviations is at most n variances, so that m
// (anchor - mean)^2 is, too, whatever the values: the sum of squares exceeds that around the mean
// by a factor of at most 1 + n / m. A constant channel has distances 0.
struct Anchored {
  float anchor = 0;
  float sum = 0;
  float squares = 0;

  __device__ void add(float value) {
    const float away = value - anchor;
    sum += away;
    squares = fmaf(away, away, squares);
  }
};

// The same of all lanes. inverse: 1 / number of values.
struct Channel {
  float anchor;
  double sum;
  double squares;

  __device__ explicit Channel(const Anchored& own)
      : Channel(own.anchor, static_cast<double>(own.sum), static_cast<double>(own.squares)) {}
  __device__ Channel(float anchor_, double sum_, double squares_)
      : anchor(anchor_), sum(sum_), squares(squares_) {}
  __device__ double mean(double inverse) const {
    return static_cast<double>(anchor) + sum * inverse;
  }
  __device__ double m2(double inverse) const {
    const double result = squares - sum * sum * inverse;
    return result < 0 ? 0 : result;  // NaN stays
  }
};

__device__ unsigned population(unsigned mask) {
  return static_cast<unsigned>(std::popcount(mask));
}

// parts: (parts, 3, channels) of mean, m2, count.
template <typename F, unsigned N>
__global__ void __launch_bounds__(kThreads, 3)
    moments_of_rows(const __grid_constant__ RowTiles tiles, const void* input, double* parts) {
  const std::size_t channel = tiles.channel<N>();
  Anchored own[N];
  unsigned terms = 0;
  for_rows<kAtOnce<F, N>>(tiles, channel, [&](std::size_t i, std::size_t step, auto rows) {
    constexpr unsigned kRows = decltype(rows)::value;
    Held<F, N> held[kRows];
#pragma unroll
    for (unsigned r = 0; r < kRows; ++r) held[r].load(input, i + r * step);
    float values[kRows][N];
#pragma unroll
    for (unsigned r = 0; r < kRows; ++r) held[r].read(values[r]);
    if (terms == 0) {
#pragma unroll
      for (unsigned k = 0; k < N; ++k) {
        float sum = 0;
#pragma unroll
        for (unsigned r = 0; r < kRows; ++r) sum += values[r][k];
        own[k].anchor = sum * (1.0F / kRows);
      }
    }
#pragma unroll
    for (unsigned r = 0; r < kRows; ++r) {
#pragma unroll
      for (unsigned k = 0; k < N; ++k) own[k].add(values[r][k]);
    }
    terms += kRows;
  });
  const double size = terms;
  const double inverse = terms == 0 ? 0 : 1 / size;
  const double count = static_cast<double>(tiles.end() - tiles.begin());
  double mean[N];
#pragma unroll
  for (unsigned k = 0; k < N; ++k) mean[k] = size * Channel(own[k]).mean(inverse);
  sum_columns(mean, tiles.across, [&](double sum) { return sum / count; });
  double m2[N];
#pragma unroll
  for (unsigned k = 0; k < N; ++k) {
    const double off = Channel(own[k]).mean(inverse) - mean[k];
    m2[k] = terms == 0 ? 0 : Channel(own[k]).m2(inverse) + size * off * off;
  }
  sum_columns(m2, tiles.across);
  if (threadIdx.x >= tiles.across || channel >= tiles.channels) return;
  double* const results = parts + std::size_t{blockIdx.x} * 3 * tiles.channels + channel;
#pragma unroll
  for (unsigned k = 0; k < N; ++k) {
    results[k] = mean[k];
    results[tiles.channels + k] = m2[k];
    results[2 * tiles.channels + k] = count;
  }
}

// The mean of what all lanes of a channel read at their first visit.
template <typename F, unsigned N>
__device__ float anchor_of(const PlaneTiles& tiles, const PlaneChunks<N>& chunks,
                           const void* input) {
  const unsigned mask = chunks.mask();
  Held<F, N> held;
  if (mask != 0) held.load(input, chunks.at());
  float values[N];
  held.read(values);
  float sum = 0;
#pragma unroll
  for (unsigned k = 0; k < N; ++k) sum += (mask >> k & 1) != 0 ? values[k] : 0;
  const unsigned count = sum_of_lanes(population(mask), tiles.lanes);
  return sum_of_lanes(sum, tiles.lanes) / static_cast<float>(count == 0 ? 1 : count);
}

template <typename F, unsigned N>
__global__ void __launch_bounds__(kThreads)
    moments_of_planes(const __grid_constant__ PlaneTiles tiles, const void* input, double* parts) {
  constexpr unsigned kMost = kAtOnce<F, N>;
  PlaneChunks<N> chunks(tiles);
  Anchored own;
  unsigned terms = 0;
  // A part may begin where its plane has no chunk any more: there is nothing to take for an anchor.
  if (sum_of_lanes(population(chunks.mask()), tiles.lanes) == 0) chunks.advance();
  own.anchor = anchor_of<F>(tiles, chunks, input);
  while (!chunks.done()) {
    Held<F, N> held[kMost];
    unsigned mask[kMost];
#pragma unroll
    for (unsigned v = 0; v < kMost; ++v) {
      mask[v] = chunks.mask();
      if (mask[v] != 0) held[v].load(input, chunks.at());
      chunks.advance();
    }
    float values[kMost][N];
#pragma unroll
    for (unsigned v = 0; v < kMost; ++v) held[v].read(values[v]);
#pragma unroll
    for (unsigned v = 0; v < kMost; ++v) {
#pragma unroll
      for (unsigned k = 0; k < N; ++k) own.add((mask[v] >> k & 1) != 0 ? values[v][k] : own.anchor);
      terms += population(mask[v]);
    }
  }
  const double size = sum_of_lanes(terms, tiles.lanes);
  // A part may have nothing but such a visit.
  const double inverse = size == 0 ? 0 : 1 / size;
  const Channel all(own.anchor, sum_of_lanes(static_cast<double>(own.sum), tiles.lanes),
                    sum_of_lanes(static_cast<double>(own.squares), tiles.lanes));
  const std::size_t channel = tiles.channel();
  if (threadIdx.x % tiles.lanes != 0 || channel >= tiles.channels) return;
  double* const results = parts + std::size_t{blockIdx.x} * 3 * tiles.channels + channel;
  results[0] = all.mean(inverse);
  results[tiles.channels] = all.m2(inverse);
  results[2 * tiles.channels] = size;
}

}  // namespace

std::size_t batch_parts_cuda(const BatchLayout& layout, std::size_t pieces) {
  const auto most = [](const auto& chunks, const auto& single) {
    return std::max(chunks.parts(), single.parts());
  };
  return layout.channels_last
             ? most(row_tiles(layout, pieces, kChunk), row_tiles(layout, pieces, 1))
             : most(plane_tiles(layout, pieces, kChunk), plane_tiles(layout, pieces, 1));
}

std::size_t batch_moments_cuda(const BatchLayout& layout, const void* input, std::size_t pieces,
                               double* parts, CudaStream stream) {
  const Head head = Head{}.add(input, bytes_of(layout.format), kChunk);
  std::size_t count = 0;
  with_tiles(layout, pieces, head, [&](auto format, auto chunk, const auto& tiles) {
    using F = decltype(format);
    constexpr unsigned kCount = decltype(chunk)::value;
    count = tiles.parts();
    if constexpr (std::is_same_v<std::decay_t<decltype(tiles)>, RowTiles>) {
      launch(stream, grid_of(tiles, kCount), kThreads, moments_of_rows<F, kCount>, tiles, input,
             parts);
    } else {
      launch(stream, grid_of(tiles), kThreads, moments_of_planes<F, kCount>, tiles, input, parts);
    }
  });
  return count;
}

}  // namespace semitone::kernels
