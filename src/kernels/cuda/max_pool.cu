#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/launch.cuh"

namespace semitone::kernels {
namespace {

// A block covers kTileRows positions in one row of a plane, and kWarp of their channels at a time.
constexpr dim3 kTile(kWarp, kTileRows);

// The part of a window that is in the input: [begin, end) there, `skipped` positions after the
// window's first.
struct Span {
  std::size_t begin;
  std::size_t end;
  std::size_t skipped;
};

__device__ Span window_of(const PoolAxis& axis, std::size_t i) {
  const std::size_t first = i * axis.stride;  // in the padded input
  const std::size_t begin = first > axis.padding ? first : axis.padding;
  const std::size_t stop = first + axis.kernel;
  const std::size_t last = axis.input + axis.padding;
  return {begin - axis.padding, (stop < last ? stop : last) - axis.padding, begin - first};
}

template <typename F>
__global__ void pool(const __grid_constant__ PoolLayout layout, const void* input, void* output,
                     std::uint8_t* places) {
  const std::size_t row = blockIdx.x;
  const std::size_t column = std::size_t{blockIdx.y} * kTileRows + threadIdx.y;
  if (column >= layout.width.output) return;
  const std::size_t image = row / layout.height.output;
  const Span ys = window_of(layout.height, row % layout.height.output);
  const Span xs = window_of(layout.width, column);
  const std::size_t channels = layout.channels;
  const auto* const plane = static_cast<const typename F::Stored*>(input) +
                            image * layout.height.input * layout.width.input * channels;
  const std::size_t to = (row * layout.width.output + column) * channels;
  for (std::size_t channel = threadIdx.x; channel < channels; channel += kWarp) {
    std::size_t best_place = ys.skipped * layout.width.kernel + xs.skipped;
    auto best = plane[(ys.begin * layout.width.input + xs.begin) * channels + channel];
    for (std::size_t y = ys.begin; y < ys.end; ++y) {
      for (std::size_t x = xs.begin; x < xs.end; ++x) {
        const auto stored = plane[(y * layout.width.input + x) * channels + channel];
        const float value = F::wide(stored);
        if (!(value > F::wide(best) || is_nan(value))) continue;
        best = stored;
        best_place = (y - ys.begin + ys.skipped) * layout.width.kernel + x - xs.begin + xs.skipped;
      }
    }
    static_cast<typename F::Stored*>(output)[to + channel] = best;
    if (places != nullptr) places[to + channel] = static_cast<std::uint8_t>(best_place);
  }
}

// The windows [begin, end) that contain an input's element.
struct Windows {
  std::size_t begin;
  std::size_t end;
};

__device__ Windows windows_of(const PoolAxis& axis, std::size_t i) {
  const std::size_t padded = i + axis.padding;
  const std::size_t begin = padded < axis.kernel ? 0 : (padded - axis.kernel) / axis.stride + 1;
  const std::size_t stop = padded / axis.stride + 1;
  const std::size_t end = stop < axis.output ? stop : axis.output;
  return {begin, begin > end ? begin : end};
}

// The position of an element in a window of one direction.
__device__ std::size_t place_in(const PoolAxis& axis, std::size_t window, std::size_t i) {
  return i + axis.padding - window * axis.stride;
}

template <typename F>
__global__ void pool_backward(const __grid_constant__ PoolLayout layout, const void* grad,
                              const std::uint8_t* places, void* grad_input) {
  const std::size_t row = blockIdx.x;
  const std::size_t x = std::size_t{blockIdx.y} * kTileRows + threadIdx.y;
  const PoolAxis& height = layout.height;
  const PoolAxis& width = layout.width;
  if (x >= width.input) return;
  const std::size_t image = row / height.input;
  const std::size_t y = row % height.input;
  const Windows vs = windows_of(height, y);
  const Windows us = windows_of(width, x);
  const auto* const from = static_cast<const typename F::Stored*>(grad);
  const bool alone = (vs.end - vs.begin) * (us.end - us.begin) == 1;
  for (std::size_t channel = threadIdx.x; channel < layout.channels; channel += kWarp) {
    float sum = 0;
    typename F::Stored only{};  // copied, so -0 and NaNs stay what they are
    for (std::size_t v = vs.begin; v < vs.end; ++v) {
      for (std::size_t u = us.begin; u < us.end; ++u) {
        const std::size_t i =
            ((image * height.output + v) * width.output + u) * layout.channels + channel;
        if (places[i] != place_in(height, v, y) * width.kernel + place_in(width, u, x)) continue;
        only = from[i];
        sum += F::wide(from[i]);
      }
    }
    static_cast<typename F::Stored*>(
        grad_input)[(row * width.input + x) * layout.channels + channel] =
        alone ? only : F::stored(sum);
  }
}

dim3 grid_of(std::size_t images, std::size_t height, std::size_t width) {
  return dim3(narrow_grid(images * height), grid_row(ceil_divide(width, kTileRows)));
}

}  // namespace

void max_pool_cuda(const PoolLayout& layout, const void* input, void* output, std::uint8_t* places,
                   std::size_t images, CudaStream stream) {
  with_format(layout.format, [&](auto format) {
    launch(stream, grid_of(images, layout.height.output, layout.width.output), kTile,
           pool<decltype(format)>, layout, input, output, places);
  });
}

void max_pool_backward_cuda(const PoolLayout& layout, const void* grad, const std::uint8_t* places,
                            void* grad_input, std::size_t images, CudaStream stream) {
  with_format(layout.format, [&](auto format) {
    launch(stream, grid_of(images, layout.height.input, layout.width.input), kTile,
           pool_backward<decltype(format)>, layout, grad, places, grad_input);
  });
}

}  // namespace semitone::kernels
