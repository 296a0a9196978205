#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/held.cuh"
#include "src/kernels/cuda/reduce.cuh"

namespace semitone::kernels {
namespace {

__device__ float weight_at(const float* weight, std::size_t i) {
  return weight == nullptr ? 1 : weight[i];
}

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

// inverse: 1 / columns.
template <typename F, typename Shape>
__global__ void __launch_bounds__(kThreads)
    normalize_rows(const __grid_constant__ LayerNormalize work, std::size_t columns,
                   std::size_t rows, double inverse) {
  constexpr unsigned N = Shape::N;
  const std::size_t row = Shape::row();
  if (row >= rows) return;
  const std::size_t first = row * columns;
  Held<F, N> held[Shape::kHeld];
  Shape::for_held(columns, [&](unsigned h, std::size_t i) { held[h].load(work.input, first + i); });
  float mean = 0;
  double variance = 0;
  if (work.centred) {
    // The first mean has the rounding errors of its sum. The sum of the deviations from it corrects
    // that, and a row of equal numbers has variance 0.
    float sum = 0;
    Shape::for_held(columns, [&](unsigned h, std::size_t) {
      float value[N];
      held[h].read(value);
      sum += sum_of(value);
    });
    const float centre = static_cast<float>(Shape::sum(sum) * inverse);
    float offset = 0;
    float squares = 0;
    Shape::for_held(columns, [&](unsigned h, std::size_t) {
      float away[N];
      float square[N];
      held[h].read(away);
#pragma unroll
      for (unsigned k = 0; k < N; ++k) {
        away[k] -= centre;
        square[k] = away[k] * away[k];
      }
      offset += sum_of(away);
      squares += sum_of(square);
    });
    const double wide_offset = Shape::sum(offset);
    variance = (Shape::sum(squares) - wide_offset * wide_offset * inverse) * inverse;
    if (variance < 0) variance = 0;  // NaN stays
    mean = static_cast<float>(static_cast<double>(centre) + wide_offset * inverse);
  } else {
    float squares = 0;
    Shape::for_held(columns, [&](unsigned h, std::size_t) {
      float square[N];
      held[h].read(square);
#pragma unroll
      for (float& value : square) value *= value;
      squares += sum_of(square);
    });
    variance = Shape::sum(squares) * inverse;
  }
  const float rstd = 1 / sqrtf(static_cast<float>(variance + work.eps));
  if (threadIdx.x % Shape::kRowThreads == 0) {
    if (work.mean != nullptr) work.mean[row] = mean;
    if (work.rstd != nullptr) work.rstd[row] = rstd;
  }
  Shape::for_held(columns, [&](unsigned h, std::size_t i) {
    float value[N];
    float weight[N];
    float bias[N] = {};
    load_weights(work.weight, i, weight);
    if (work.bias != nullptr) load<Fp32>(work.bias, i, bias);
    held[h].read(value);
#pragma unroll
    for (unsigned k = 0; k < N; ++k) {
      if (work.centred) value[k] = value[k] - mean;
      value[k] = value[k] * rstd * weight[k];
      if (work.bias != nullptr) value[k] = value[k] + bias[k];
    }
    store<F>(value, work.output, first + i);
  });
}

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

// One block per row, for rows that are too long to be held. Reads them three times.
template <typename F>
__global__ void __launch_bounds__(kThreads)
    normalize_long_row(const __grid_constant__ LayerNormalize work, std::size_t columns) {
  const std::size_t row = blockIdx.x;
  const std::size_t first = row * columns;
  const double size = static_cast<double>(columns);
  float mean = 0;
  double variance = 0;
  if (work.centred) {
    // The first mean has the rounding errors of its sum. The sum of the
    // deviations from it corrects that, and a row of equal numbers has variance 0.
    WideSum own;
    for (std::size_t i = threadIdx.x; i < columns; i += blockDim.x)
      own.add(load<F>(work.input, first + i));
    const float centre = static_cast<float>(block_sum(own.total()) / size);
    WideSum own_offset;
    WideSum own_squares;
    for (std::size_t i = threadIdx.x; i < columns; i += blockDim.x) {
      const float away = load<F>(work.input, first + i) - centre;
      own_offset.add(away);
      own_squares.add(away * away);
    }
    const double offset = block_sum(own_offset.total());
    variance = (block_sum(own_squares.total()) - offset * offset / size) / size;
    if (variance < 0) variance = 0;  // NaN stays
    mean = static_cast<float>(static_cast<double>(centre) + offset / size);
  } else {
    WideSum own;
    for (std::size_t i = threadIdx.x; i < columns; i += blockDim.x) {
      const float v = load<F>(work.input, first + i);
      own.add(v * v);
    }
    variance = block_sum(own.total()) / size;
  }
  const float rstd = static_cast<float>(1 / sqrt(variance + work.eps));
  if (threadIdx.x == 0) {
    if (work.mean != nullptr) work.mean[row] = mean;
    if (work.rstd != nullptr) work.rstd[row] = rstd;
  }
  for (std::size_t i = threadIdx.x; i < columns; i += blockDim.x) {
    float v = load<F>(work.input, first + i);
    if (work.centred) v = v - mean;
    v = v * rstd * weight_at(work.weight, i);
    store<F>(work.bias == nullptr ? v : v + work.bias[i], work.output, first + i);
  }
}

// The gradient of the input, in the same way. Reads both rows twice.
template <typename F>
__global__ void __launch_bounds__(kThreads)
    gradient_of_long_row(const __grid_constant__ LayerNormGradient work, std::size_t columns) {
  const std::size_t row = blockIdx.x;
  const std::size_t first = row * columns;
  const float mean = work.centred ? work.mean[row] : 0;
  const float rstd = work.rstd[row];
  WideSum own_g;
  WideSum own_g_times_a;
  for (std::size_t i = threadIdx.x; i < columns; i += blockDim.x) {
    float a = load<F>(work.input, first + i);
    if (work.centred) a = a - mean;
    const float g = load<F>(work.grad, first + i) * weight_at(work.weight, i);
    own_g.add(g);
    own_g_times_a.add(g * (a * rstd));
  }
  const double size = static_cast<double>(columns);
  const double wide_rstd = static_cast<double>(rstd);
  const double mean_g = block_sum(own_g.total()) / size;
  const double mean_g_times_a = block_sum(own_g_times_a.total()) / size;
  const float slope = static_cast<float>(-wide_rstd * wide_rstd * mean_g_times_a);
  const float shift = static_cast<float>(-wide_rstd * mean_g);
  for (std::size_t i = threadIdx.x; i < columns; i += blockDim.x) {
    const float g = load<F>(work.grad, first + i) * weight_at(work.weight, i);
    float v = load<F>(work.input, first + i);
    v = work.centred ? (v - mean) * slope + shift : v * slope;
    store<F>(g * rstd + v, work.output, first + i);
  }
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

}  // namespace

void layer_normalize_cuda(const RowLayout& layout, const LayerNormalize& work, std::size_t rows,
                          CudaStream stream) {
  const std::size_t columns = layout.columns;
  const std::size_t bytes = bytes_of(layout.format);
  const Head head = Head{}
                        .add(work.input, bytes, kChunk)
                        .add(work.output, bytes, kChunk)
                        .add(work.weight, sizeof(float), kChunk)
                        .add(work.bias, sizeof(float), kChunk);
  const double inverse = 1 / static_cast<double>(columns);
  with_format(layout.format, [&](auto format) {
    using F = decltype(format);
    const bool is_held = with_shape<32>(columns, head, [&](auto shape) {
      using Shape = decltype(shape);
      launch(stream, grid_of<Shape>(rows), kThreads, normalize_rows<F, Shape>, work, columns, rows,
             inverse);
    });
    if (is_held) return;
    launch(stream, narrow_grid(rows), kThreads, normalize_long_row<F>, work, columns);
  });
}

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
