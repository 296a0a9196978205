#pragma once

#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/reduce.cuh"

#include <cstddef>
#include <cstdint>

// How layer and RMS norm share rows among threads.
namespace semitone::kernels {

// How rows are shared among threads: kRowThreads for a row, a warp or a block, each with at most
// kHeld chunks of N elements, kRowThreads chunks apart.
template <unsigned N_, unsigned kHeld_, unsigned kRowThreads_>
struct RowShape {
  static constexpr unsigned N = N_;
  static constexpr unsigned kHeld = kHeld_;
  static constexpr unsigned kRowThreads = kRowThreads_;
  static constexpr unsigned kRows = kThreads / kRowThreads;
  static constexpr std::size_t kMostColumns = std::size_t{N} * kHeld * kRowThreads;

  static __device__ std::size_t row() {
    return std::size_t{blockIdx.x} * kRows + threadIdx.x / kRowThreads;
  }
  // Calls visit(h, first column of this thread's chunk h).
  template <typename Visit>
  static __device__ void for_held(std::size_t columns, const Visit& visit) {
#pragma unroll
    for (unsigned h = 0; h < kHeld; ++h) {
      const unsigned i = (h * kRowThreads + threadIdx.x % kRowThreads) * N;
      if (i < columns) visit(h, i);
    }
  }
  // Over the threads of a row: pairwise in fp32 within a warp, in fp64 between warps.
  static __device__ double sum(float own) {
    for (unsigned away = kWarp / 2; away > 0; away /= 2)
      own += __shfl_xor_sync(0xFFFFFFFFU, own, static_cast<int>(away));
    if constexpr (kRowThreads == kWarp) {
      return static_cast<double>(own);
    } else {
      return sum_of_warps(static_cast<double>(own));
    }
  }
};

// The weights of N columns; 1 without.
template <unsigned N>
__device__ void load_weights(const float* weight, std::size_t i, float (&values)[N]) {
  if (weight == nullptr) {
#pragma unroll
    for (float& value : values) value = 1;
  } else {
    load<Fp32>(weight, i, values);
  }
}

// Numbers of columns, weights or biases, beside long rows whose first chunk begins behind `head`
// elements.
class OfColumns {
 public:
  __device__ OfColumns(const float* numbers, std::size_t head)
      : numbers_(numbers),
        has_chunks_((reinterpret_cast<std::uintptr_t>(numbers) / sizeof(float) + head) % 4 == 0) {}

  __device__ bool exist() const { return numbers_ != nullptr; }
  // Without any: `other`.
  template <unsigned N>
  __device__ void load_from(std::size_t i, float other, float (&values)[N]) const {
    if (exist() && has_chunks_) return load<Fp32>(numbers_, i, values);
#pragma unroll
    for (unsigned k = 0; k < N; ++k) values[k] = exist() ? numbers_[i + k] : other;
  }

 private:
  const float* numbers_;
  bool has_chunks_;
};

// Where the first chunk of a long row begins in one tensor, or in several that agree.
template <typename F, typename... More>
__device__ std::size_t head_of_row(std::size_t first, const More*... tensors) {
  Head head;
  (head.add(static_cast<const typename F::Stored*>(static_cast<const void*>(tensors)) + first,
            sizeof(typename F::Stored), kChunk),
   ...);
  return head.elements();
}

// Calls work(RowShape) for the smallest shape that holds a row, if there is one. Elements that are
// not in chunks take a register and an access each, so a thread has few of them.
template <unsigned N, unsigned kElements, typename Work>
bool with_shape_of(std::size_t columns, const Work& work) {
  using Narrow = RowShape<N, 8 / N, kWarp>;
  using Medium = RowShape<N, (N == 1 ? 8 : kElements) / N, kWarp>;
  using Wide = RowShape<N, (N == 1 ? 8 : kElements) / N, kThreads>;
  if (columns <= Narrow::kMostColumns) {
    work(Narrow{});
  } else if (columns <= Medium::kMostColumns) {
    work(Medium{});
  } else if (columns <= Wide::kMostColumns) {
    work(Wide{});
  } else {
    return false;
  }
  return true;
}

// kElements: of a row, for each thread.
template <unsigned kElements, typename Work>
bool with_shape(std::size_t columns, const Head& head, const Work& work) {
  bool done = false;
  with_chunk(columns, head, [&](auto chunk) {
    constexpr unsigned N = decltype(chunk)::value;
    done = with_shape_of<N, kElements>(columns, work);
  });
  return done;
}

template <typename Shape>
unsigned grid_of(std::size_t rows) {
  return narrow_grid(ceil_divide(rows, Shape::kRows));
}

}  // namespace semitone::kernels
