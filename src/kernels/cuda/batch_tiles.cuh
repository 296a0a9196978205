#pragma once

#include "src/kernels/batch_norm_kernel.h"
#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/launch.cuh"

#include <algorithm>
#include <cstddef>

// How blocks of threads share a batch for sums over its channels: a block sums a part of some
// channels, and another launch joins the parts. Threads read chunks of N elements.
namespace semitone::kernels {

// About this many blocks keep all multiprocessors of a large device busy.
constexpr std::size_t kSumBlocks = 512;

// A thread reads so many chunks before it adds their elements: 64 bytes.
template <typename F, unsigned N>
constexpr unsigned kAtOnce = N == 1 ? 4 : 64 / (N * sizeof(typename F::Stored));

// Channels last: every `across` neighbours of a block have the chunks of a row, as far as they go,
// and the threads behind them those of the next rows.
struct RowTiles {
  std::size_t rows;
  std::size_t channels;
  std::size_t of_part;  // rows that a block sums
  unsigned across;      // a power of two

  __host__ __device__ std::size_t down() const { return kThreads / across; }
  __host__ __device__ std::size_t parts() const { return ceil_divide(rows, of_part); }
  template <unsigned N>
  __device__ std::size_t channel() const {
    return (std::size_t{blockIdx.y} * across + threadIdx.x % across) * N;
  }
  __device__ std::size_t begin() const { return std::size_t{blockIdx.x} * of_part; }
  __device__ std::size_t end() const {
    const std::size_t stop = begin() + of_part;
    return stop < rows ? stop : rows;
  }
};

// A thread has 16 to 256 rows: fewer do not pay for joining its sums, and more terms would need
// fp64.
inline RowTiles row_tiles(const BatchLayout& layout, std::size_t rows, unsigned chunk) {
  RowTiles tiles{rows, layout.channels, 0, 1};
  while (tiles.across < kWarp && std::size_t{tiles.across} * chunk < layout.channels)
    tiles.across *= 2;
  const std::size_t columns = ceil_divide(layout.channels, std::size_t{tiles.across} * chunk);
  const std::size_t parts = std::max<std::size_t>(1, kSumBlocks / columns);
  tiles.of_part = std::clamp(ceil_divide(rows, parts), 16 * tiles.down(), kTerms * tiles.down());
  return tiles;
}

// Calls visit(i, step, Count<M>{}) for M chunks that begin at elements i, i + step, ….
template <unsigned kMost, typename Visit>
__device__ void for_rows(const RowTiles& tiles, std::size_t channel, const Visit& visit) {
  if (channel >= tiles.channels) return;
  const std::size_t down = tiles.down();
  const std::size_t step = down * tiles.channels;
  const std::size_t end = tiles.end();
  std::size_t row = tiles.begin() + threadIdx.x / tiles.across;
  for (; row + (kMost - 1) * down < end; row += kMost * down)
    visit(row * tiles.channels + channel, step, Count<kMost>{});
  for (; row < end; row += down) visit(row * tiles.channels + channel, step, Count<1>{});
}

// Planes: `lanes` neighbours of a block share the planes of a channel, and a lane visits each plane
// `slots` times.
struct PlaneTiles {
  std::size_t channels;
  unsigned length;
  std::size_t visits;   // of a lane, to all planes of its channel
  std::size_t of_part;  // visits of a lane in a block
  unsigned slots;
  unsigned lanes;  // a power of two, of one warp

  __host__ __device__ std::size_t together() const { return kThreads / lanes; }  // channels
  __host__ __device__ std::size_t parts() const { return ceil_divide(visits, of_part); }
  __device__ std::size_t channel() const { return blockIdx.y * together() + threadIdx.x / lanes; }
};

// A lane has 64 to 256 elements.
inline PlaneTiles plane_tiles(const BatchLayout& layout, std::size_t planes, unsigned chunk) {
  PlaneTiles tiles{layout.channels, static_cast<unsigned>(layout.length), 0, 0, 1, 1};
  // A plane that begins within a chunk may need one more.
  const std::size_t begins_within = layout.length % chunk == 0 ? 0 : chunk - 1;
  const std::size_t chunks = ceil_divide(layout.length + begins_within, chunk);
  while (tiles.lanes < kWarp && tiles.lanes < chunks) tiles.lanes *= 2;
  tiles.slots = narrow_grid(ceil_divide(chunks, tiles.lanes));
  tiles.visits = planes / layout.channels * tiles.slots;
  const std::size_t rows = ceil_divide(layout.channels, tiles.together());
  const std::size_t parts = std::max<std::size_t>(1, kSumBlocks / rows);
  tiles.of_part =
      std::clamp<std::size_t>(ceil_divide(tiles.visits, parts), 64 / chunk, kTerms / chunk);
  return tiles;
}

// The chunks that a lane visits, one after the other. With N > 1 they begin at multiples of N, so
// that a plane's first and last one may have elements of its neighbours.
template <unsigned N>
class PlaneChunks {
 public:
  __device__ explicit PlaneChunks(const PlaneTiles& tiles) : tiles_(tiles) {
    const std::size_t visit = std::size_t{blockIdx.x} * tiles.of_part;
    const std::size_t rest = tiles.visits - visit;
    const std::size_t channel = tiles.channel();
    const std::size_t left = rest < tiles.of_part ? rest : tiles.of_part;
    left_ = channel >= tiles.channels ? 0 : static_cast<unsigned>(left);
    slot_ = static_cast<unsigned>(visit % tiles.slots);
    go_to_plane((visit / tiles.slots * tiles.channels + channel) * tiles.length);
  }
  // The chunk's first element.
  __device__ std::size_t at() const { return first_ + place(); }
  // A bit for each of its elements in the plane; 0 behind the last chunk.
  __device__ unsigned mask() const {
    constexpr unsigned kAll = (1U << N) - 1;
    const int from = static_cast<int>(before_) - static_cast<int>(place());
    const int to = left_ == 0 ? 0 : from + static_cast<int>(tiles_.length);
    constexpr int kCount = static_cast<int>(N);
    const unsigned begin = kAll << (from < 0 ? 0 : from);
    const unsigned end = (1U << (to < 0 ? 0 : to > kCount ? kCount : to)) - 1;
    return begin & end;
  }
  __device__ void advance() {
    if (left_ == 0) return;
    --left_;
    if (++slot_ < tiles_.slots) return;
    slot_ = 0;
    go_to_plane(first_ + before_ + tiles_.channels * tiles_.length);
  }
  __device__ bool done() const { return left_ == 0; }

 private:
  __device__ void go_to_plane(std::size_t begin) {
    before_ = static_cast<unsigned>(begin % N);
    first_ = begin - before_;
  }
  // Of the chunk, from the plane's first one on.
  __device__ unsigned place() const {
    return (slot_ * tiles_.lanes + threadIdx.x % tiles_.lanes) * N;
  }

  const PlaneTiles& tiles_;
  std::size_t first_;  // element of the plane's first chunk
  unsigned before_;    // elements there that are not the plane's
  unsigned slot_;
  unsigned left_;
};

// Over the lanes that share a channel.
template <typename T>
__device__ T sum_of_lanes(T value, unsigned lanes) {
  for (unsigned away = kWarp / 2; away > 0; away /= 2) {
    const T other = __shfl_xor_sync(0xFFFFFFFFU, value, static_cast<int>(away));
    if (away < lanes) value += other;
  }
  return value;
}

// Chunks of eight elements, where all tensors allow it: those of a batch of planes must be whole.
inline bool has_chunks(const BatchLayout& layout, std::size_t pieces, const Head& head) {
  return head.elements() == 0 &&
         (layout.channels_last ? layout.channels : pieces * layout.length) % kChunk == 0;
}

// Calls work(F, Count<elements of a chunk>{}, tiles) with the format as a type.
template <typename Work>
void with_tiles(const BatchLayout& layout, std::size_t pieces, const Head& head, const Work& work) {
  with_format(layout.format, [&](auto format) {
    const auto with_count = [&](auto count) {
      constexpr unsigned kCount = decltype(count)::value;
      if (layout.channels_last) {
        work(format, count, row_tiles(layout, pieces, kCount));
      } else {
        work(format, count, plane_tiles(layout, pieces, kCount));
      }
    };
    if (has_chunks(layout, pieces, head)) {
      with_count(Count<kChunk>{});
    } else {
      with_count(Count<1>{});
    }
  });
}

inline dim3 grid_of(const RowTiles& tiles, unsigned chunk) {
  return dim3(narrow_grid(tiles.parts()),
              grid_row(ceil_divide(tiles.channels, std::size_t{tiles.across} * chunk)));
}
inline dim3 grid_of(const PlaneTiles& tiles) {
  return dim3(narrow_grid(tiles.parts()), grid_row(ceil_divide(tiles.channels, tiles.together())));
}

}  // namespace semitone::kernels
