#include "src/kernels/cuda/held.cuh"
#include "src/kernels/cuda/layer_rows.cuh"

namespace semitone::kernels {
namespace {

// The gradient of the input.
template <typename F, typename Shape>
__global__ void __launch_bounds__(kThreads, 3)
    gradient_of_rows(const __grid_constant__ LayerNormGradient work, std::size_t columns,
                     std::size_t rows, double inverse) {
  constexpr unsigned N = Shape::N;
  const std::size_t row = Shape::row();
  if (row >= rows) return;
  const std::size_t first = row * columns;
  Held<F, N> input[Shape::kHeld];
  Held<F, N> grad[Shape::kHeld];
  Shape::for_held(columns, [&](unsigned h, std::size_t i) {
    input[h].load(work.input, first + i);
    grad[h].load(work.grad, first + i);
  });
  const float mean = work.centred ? work.mean[row] : 0;
  const float rstd = work.rstd[row];
  float own_g = 0;
  float own_g_times_a = 0;
  Shape::for_held(columns, [&](unsigned h, std::size_t i) {
    float a[N];
    float g[N];
    float weight[N];
    load_weights(work.weight, i, weight);
    input[h].read(a);
    grad[h].read(g);
#pragma unroll
    for (unsigned k = 0; k < N; ++k) {
      if (work.centred) a[k] = a[k] - mean;
      g[k] = g[k] * weight[k];
      a[k] = g[k] * (a[k] * rstd);
    }
    own_g += sum_of(g);
    own_g_times_a += sum_of(a);
  });
  const double wide_rstd = static_cast<double>(rstd);
  const double mean_g = Shape::sum(own_g) * inverse;
  const double mean_g_times_a = Shape::sum(own_g_times_a) * inverse;
  const float slope = static_cast<float>(-wide_rstd * wide_rstd * mean_g_times_a);
  const float shift = static_cast<float>(-wide_rstd * mean_g);
  Shape::for_held(columns, [&](unsigned h, std::size_t i) {
    float v[N];
    float g[N];
    float weight[N];
    load_weights(work.weight, i, weight);
    input[h].read(v);
    grad[h].read(g);
#pragma unroll
    for (unsigned k = 0; k < N; ++k) {
      v[k] = work.centred ? (v[k] - mean) * slope + shift : v[k] * slope;
      v[k] = g[k] * weight[k] * rstd + v[k];
    }
    store<F>(v, work.output, first + i);
  });
}

// One block per row, for rows that are too long to be held. Reads both of them twice.
template <typename F>
__global__ void __launch_bounds__(kThreads)
    gradient_of_long_row(const __grid_constant__ LayerNormGradient work, std::size_t columns) {
  const std::size_t row = blockIdx.x;
  const std::size_t first = row * columns;
  const Share share{threadIdx.x, kThreads};
  const float mean = work.centred ? work.mean[row] : 0;
  const float rstd = work.rstd[row];
  PairSum own_g;
  PairSum own_g_times_a;
  const std::size_t head_of_sums = head_of_row<F>(first, work.input, work.grad);
  const OfColumns weights_of_sums(work.weight, head_of_sums);
  for_chunks<kChunk>(0, columns, head_of_sums, share, [&](std::size_t i, auto count) {
    constexpr unsigned N = decltype(count)::value;
    float a[N];
    float g[N];
    float weight[N];
    load<F>(work.input, first + i, a);
    load<F>(work.grad, first + i, g);
    weights_of_sums.load_from(i, 1, weight);
#pragma unroll
    for (unsigned k = 0; k < N; ++k) {
      if (work.centred) a[k] = a[k] - mean;
      g[k] = g[k] * weight[k];
      a[k] = g[k] * (a[k] * rstd);
    }
    own_g.add(sum_of(g));
    own_g_times_a.add(sum_of(a));
  });
  const double size = static_cast<double>(columns);
  const double wide_rstd = static_cast<double>(rstd);
  const double mean_g = block_sum(own_g.total()) / size;
  const double mean_g_times_a = block_sum(own_g_times_a.total()) / size;
  const float slope = static_cast<float>(-wide_rstd * wide_rstd * mean_g_times_a);
  const float shift = static_cast<float>(-wide_rstd * mean_g);
  const std::size_t head = head_of_row<F>(first, work.input, work.grad, work.output);
  const OfColumns weights(work.weight, head);
  for_chunks<kChunk>(0, columns, head, share, [&](std::size_t i, auto count) {
    constexpr unsigned N = decltype(count)::value;
    float v[N];
    float g[N];
    float weight[N];
    load<F>(work.input, first + i, v);
    load<F>(work.grad, first + i, g);
    weights.load_from(i, 1, weight);
#pragma unroll
    for (unsigned k = 0; k < N; ++k) {
      v[k] = work.centred ? (v[k] - mean) * slope + shift : v[k] * slope;
      v[k] = g[k] * weight[k] * rstd + v[k];
    }
    store<F>(v, work.output, first + i);
  });
}

// A block has `across` chunks of neighbouring columns, a power of two, and a part of the rows, of at
// most 256; a thread has at most 256 terms.
template <typename F, unsigned N>
__global__ void __launch_bounds__(kThreads)
    column_sums(const __grid_constant__ LayerNormGradient work, std::size_t columns,
                std::size_t rows, std::size_t rows_of_part, unsigned across, float* parts) {
  const std::size_t column = (std::size_t{blockIdx.y} * across + threadIdx.x % across) * N;
  const std::size_t stop = (std::size_t{blockIdx.x} + 1) * rows_of_part;
  const std::size_t end = stop < rows ? stop : rows;
  float weights[N] = {};
  float biases[N] = {};
  if (column < columns) {
#pragma unroll 2
    for (std::size_t row = blockIdx.x * rows_of_part + threadIdx.x / across; row < end;
         row += kThreads / across) {
      Held<F, N> input;
      Held<F, N> grad;
      input.load(work.input, row * columns + column);
      grad.load(work.grad, row * columns + column);
      const float mean = work.centred ? work.mean[row] : 0;
      const float rstd = work.rstd[row];
      float a[N];
      float g[N];
      input.read(a);
      grad.read(g);
#pragma unroll
      for (unsigned k = 0; k < N; ++k) {
        if (work.centred) a[k] = a[k] - mean;
        weights[k] += g[k] * (a[k] * rstd);
        biases[k] += g[k];
      }
    }
  }
  float* const results = parts + std::size_t{blockIdx.x} * 2 * columns + column;
  const bool writes = threadIdx.x < across && column < columns;
  double sums[N];
#pragma unroll
  for (unsigned k = 0; k < N; ++k) sums[k] = static_cast<double>(weights[k]);
  sum_columns(sums, across);
#pragma unroll
  for (unsigned k = 0; k < N; ++k) {
    if (writes) results[k] = static_cast<float>(sums[k]);
    sums[k] = static_cast<double>(biases[k]);
  }
  sum_columns(sums, across);
#pragma unroll
  for (unsigned k = 0; k < N; ++k)
    if (writes) results[columns + k] = static_cast<float>(sums[k]);
}

}  // namespace

void layer_norm_gradient_cuda(const RowLayout& layout, const LayerNormGradient& work,
                              std::size_t rows, std::size_t rows_of_part, float* parts,
                              CudaStream stream) {
  const std::size_t columns = layout.columns;
  const std::size_t bytes = bytes_of(layout.format);
  const Head head = Head{}
                        .add(work.input, bytes, kChunk)
                        .add(work.grad, bytes, kChunk)
                        .add(work.output, bytes, kChunk)
                        .add(work.weight, sizeof(float), kChunk);
  const double inverse = 1 / static_cast<double>(columns);
  with_format(layout.format, [&](auto format) {
    using F = decltype(format);
    if (work.output != nullptr) {
      // Two rows in 32 registers.
      constexpr unsigned kElements = 64 / sizeof(typename F::Stored);
      const bool is_held = with_shape<kElements>(columns, head, [&](auto shape) {
        using Shape = decltype(shape);
        launch(stream, grid_of<Shape>(rows), kThreads, gradient_of_rows<F, Shape>, work, columns,
               rows, inverse);
      });
      if (!is_held)
        launch(stream, narrow_grid(rows), kThreads, gradient_of_long_row<F>, work, columns);
    }
    if (parts != nullptr) {
      const Head of_sums = Head{}.add(work.input, bytes, kChunk).add(work.grad, bytes, kChunk);
      with_chunk(columns, of_sums, [&](auto chunk) {
        constexpr unsigned N = decltype(chunk)::value;
        unsigned across = 1;
        while (across < kWarp && std::size_t{across} * N < columns) across *= 2;
        const dim3 grid(narrow_grid(ceil_divide(rows, rows_of_part)),
                        grid_row(ceil_divide(columns, std::size_t{across} * N)));
        launch(stream, grid, kThreads, column_sums<F, N>, work, columns, rows, rows_of_part, across,
               parts);
      });
    }
  });
}

}  // namespace semitone::kernels
