#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/launch.cuh"

namespace semitone::kernels {
namespace {

// A block covers positions in one row of a plane. Every `across` neighbours have a position's
// channels in turn, in chunks, and the threads behind them the next position.
unsigned across_for(std::size_t channels, unsigned chunk) {
  unsigned across = 1;
  while (across < kWarp && std::size_t{across} * chunk < channels) across *= 2;
  return across;
}

__device__ unsigned column_of(unsigned across) {
  return blockIdx.y * (kThreads / across) + threadIdx.x / across;
}

// The places of a chunk's elements in their windows.
template <unsigned N>
__device__ void load_places(const std::uint8_t* from, std::size_t i, unsigned (&places)[N]) {
  if constexpr (N == 1) {
    places[0] = from[i];
  } else {
    std::uint32_t words[N / 4];
    load_words(from + i, words);
#pragma unroll
    for (unsigned k = 0; k < N; ++k) places[k] = words[k / 4] >> (8 * (k % 4)) & 0xFF;
  }
}

template <unsigned N>
__device__ void store_places(const unsigned (&places)[N], std::uint8_t* to, std::size_t i) {
  if constexpr (N == 1) {
    to[i] = static_cast<std::uint8_t>(places[0]);
  } else {
    std::uint32_t words[N / 4] = {};
#pragma unroll
    for (unsigned k = 0; k < N; ++k) words[k / 4] |= places[k] << (8 * (k % 4));
    store_words(words, to + i);
  }
}

// The part of a window that is in the input: [begin, end) there, `skipped` positions after the
// window's first. A grid covers fewer than 2^31 rows and columns.
struct Span {
  unsigned begin;
  unsigned end;
  unsigned skipped;
};

__device__ Span window_of(const PoolAxis& axis, unsigned i) {
  const auto padding = static_cast<unsigned>(axis.padding);
  const unsigned first = i * static_cast<unsigned>(axis.stride);  // in the padded input
  const unsigned begin = first > padding ? first : padding;
  const unsigned stop = first + static_cast<unsigned>(axis.kernel);
  const unsigned last = static_cast<unsigned>(axis.input) + padding;
  return {begin - padding, (stop < last ? stop : last) - padding, begin - first};
}

template <typename F, unsigned N>
__global__ void __launch_bounds__(kThreads)
    pool(const __grid_constant__ PoolLayout layout, unsigned across, const void* input,
         void* output, std::uint8_t* places) {
  const unsigned row = blockIdx.x;
  const unsigned column = column_of(across);
  if (column >= layout.width.output) return;
  const auto height = static_cast<unsigned>(layout.height.output);
  const auto places_across = static_cast<unsigned>(layout.width.kernel);
  const Span ys = window_of(layout.height, row % height);
  const Span xs = window_of(layout.width, column);
  const std::size_t channels = layout.channels;
  const std::size_t plane = std::size_t{row / height} * layout.height.input;
  const std::size_t to = (row * layout.width.output + column) * channels;
  for (std::size_t channel = threadIdx.x % across * N; channel < channels; channel += across * N) {
    float best[N];
    unsigned best_place[N];
    const auto from = [&](unsigned y) {
      return ((plane + y) * layout.width.input + xs.begin) * channels + channel;
    };
    load<F>(input, from(ys.begin), best);
#pragma unroll
    for (unsigned& place : best_place) place = ys.skipped * places_across + xs.skipped;
    for (unsigned y = ys.begin; y < ys.end; ++y) {
      unsigned place = (y - ys.begin + ys.skipped) * places_across + xs.skipped;
      std::size_t i = from(y);
      for (unsigned x = xs.begin; x < xs.end; ++x, ++place, i += channels) {
        float values[N];
        load<F>(input, i, values);
#pragma unroll
        for (unsigned k = 0; k < N; ++k) {
          if (!(values[k] > best[k] || is_nan(values[k]))) continue;
          best[k] = values[k];
          best_place[k] = place;
        }
      }
    }
    store<F>(best, output, to + channel);
    if (places != nullptr) store_places(best_place, places, to + channel);
  }
}

// The windows [begin, end) that contain an input's element.
struct Windows {
  unsigned begin;
  unsigned end;
};

__device__ Windows windows_of(const PoolAxis& axis, unsigned i) {
  const auto kernel = static_cast<unsigned>(axis.kernel);
  const auto stride = static_cast<unsigned>(axis.stride);
  const auto output = static_cast<unsigned>(axis.output);
  const unsigned padded = i + static_cast<unsigned>(axis.padding);
  const unsigned begin = padded < kernel ? 0 : (padded - kernel) / stride + 1;
  const unsigned stop = padded / stride + 1;
  const unsigned end = stop < output ? stop : output;
  return {begin, begin > end ? begin : end};
}

// The position of an element in a window of one direction.
__device__ unsigned place_in(const PoolAxis& axis, unsigned window, unsigned i) {
  return i + static_cast<unsigned>(axis.padding) - window * static_cast<unsigned>(axis.stride);
}

template <typename F, unsigned N>
__global__ void __launch_bounds__(kThreads)
    pool_backward(const __grid_constant__ PoolLayout layout, unsigned across, const void* grad,
                  const std::uint8_t* places, void* grad_input) {
  const unsigned row = blockIdx.x;
  const unsigned x = column_of(across);
  const PoolAxis& height = layout.height;
  const PoolAxis& width = layout.width;
  if (x >= width.input) return;
  const auto rows = static_cast<unsigned>(height.input);
  const auto places_across = static_cast<unsigned>(width.kernel);
  const std::size_t first = row / rows * height.output;  // row of the image's results
  const unsigned y = row % rows;
  const Windows vs = windows_of(height, y);
  const Windows us = windows_of(width, x);
  const bool alone = (vs.end - vs.begin) * (us.end - us.begin) == 1;
  for (std::size_t channel = threadIdx.x % across * N; channel < layout.channels;
       channel += across * N) {
    float sum[N] = {};
    for (unsigned v = vs.begin; v < vs.end; ++v) {
      std::size_t i = ((first + v) * width.output + us.begin) * layout.channels + channel;
      for (unsigned u = us.begin; u < us.end; ++u, i += layout.channels) {
        const unsigned here = place_in(height, v, y) * places_across + place_in(width, u, x);
        unsigned place[N];
        float value[N];
        load_places(places, i, place);
        load<F>(grad, i, value);
#pragma unroll
        for (unsigned k = 0; k < N; ++k) {
          // Not 0 + value, which would make 0 of -0.
          const float with = alone ? value[k] : sum[k] + value[k];
          sum[k] = place[k] == here ? with : sum[k];
        }
      }
    }
    store<F>(sum, grad_input, (row * width.input + x) * layout.channels + channel);
  }
}

dim3 grid_of(std::size_t images, std::size_t height, std::size_t width, unsigned across) {
  return dim3(narrow_grid(images * height), grid_row(ceil_divide(width, kThreads / across)));
}

}  // namespace

void max_pool_cuda(const PoolLayout& layout, const void* input, void* output, std::uint8_t* places,
                   std::size_t images, CudaStream stream) {
  const std::size_t bytes = bytes_of(layout.format);
  const Head head =
      Head{}.add(input, bytes, kChunk).add(output, bytes, kChunk).add(places, 1, kChunk);
  with_format(layout.format, [&](auto format) {
    with_chunk(layout.channels, head, [&](auto chunk) {
      constexpr unsigned N = decltype(chunk)::value;
      const unsigned across = across_for(layout.channels, N);
      launch(stream, grid_of(images, layout.height.output, layout.width.output, across), kThreads,
             pool<decltype(format), N>, layout, across, input, output, places);
    });
  });
}

void max_pool_backward_cuda(const PoolLayout& layout, const void* grad, const std::uint8_t* places,
                            void* grad_input, std::size_t images, CudaStream stream) {
  const std::size_t bytes = bytes_of(layout.format);
  const Head head =
      Head{}.add(grad, bytes, kChunk).add(grad_input, bytes, kChunk).add(places, 1, kChunk);
  with_format(layout.format, [&](auto format) {
    with_chunk(layout.channels, head, [&](auto chunk) {
      constexpr unsigned N = decltype(chunk)::value;
      const unsigned across = across_for(layout.channels, N);
      launch(stream, grid_of(images, layout.height.input, layout.width.input, across), kThreads,
             pool_backward<decltype(format), N>, layout, across, grad, places, grad_input);
    });
  });
}

}  // namespace semitone::kernels
