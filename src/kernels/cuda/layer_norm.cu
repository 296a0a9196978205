#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/reduce.cuh"

namespace semitone::kernels {
namespace {

__device__ float weight_at(const float* weight, std::size_t i) {
  return weight == nullptr ? 1 : weight[i];
}

// One block per row.
template <typename F>
__global__ void normalize_row(const __grid_constant__ LayerNormalize work, std::size_t columns) {
  const std::size_t row = blockIdx.x;
  const std::size_t first = row * columns;
  const double size = static_cast<double>(columns);
  float mean = 0;
  double variance = 0;
  if (work.centred) {
    // Reads the row twice. The first mean has the rounding errors of its sum. The sum of the
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

// One block per row: the gradient of the input.
template <typename F>
__global__ void gradient_of_row(const __grid_constant__ LayerNormGradient work,
                                std::size_t columns) {
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

// One block for kWarp columns and a part of the rows, of at most 256: kTileRows sums of 32 terms.
template <typename F>
__global__ void column_sums(const __grid_constant__ LayerNormGradient work, std::size_t columns,
                            std::size_t rows, std::size_t rows_of_part, float* parts) {
  const std::size_t column = std::size_t{blockIdx.y} * kWarp + threadIdx.x;
  const std::size_t stop = (std::size_t{blockIdx.x} + 1) * rows_of_part;
  const std::size_t end = stop < rows ? stop : rows;
  float weight = 0;
  float bias = 0;
  if (column < columns) {
    for (std::size_t row = blockIdx.x * rows_of_part + threadIdx.y; row < end; row += kTileRows) {
      const float grad_output = load<F>(work.grad, row * columns + column);
      float a = load<F>(work.input, row * columns + column);
      if (work.centred) a = a - work.mean[row];
      weight += grad_output * (a * work.rstd[row]);
      bias += grad_output;
    }
  }
  const double weights = column_sum(static_cast<double>(weight));
  const double biases = column_sum(static_cast<double>(bias));
  if (column >= columns || threadIdx.y != 0) return;
  float* const results = parts + blockIdx.x * 2 * columns + column;
  results[0] = static_cast<float>(weights);
  results[columns] = static_cast<float>(biases);
}

}  // namespace

void layer_normalize_cuda(const RowLayout& layout, const LayerNormalize& work, std::size_t rows,
                          CudaStream stream) {
  with_format(layout.format, [&](auto format) {
    launch(stream, narrow_grid(rows), threads_for(layout.columns), normalize_row<decltype(format)>,
           work, layout.columns);
  });
}

void layer_norm_gradient_cuda(const RowLayout& layout, const LayerNormGradient& work,
                              std::size_t rows, std::size_t rows_of_part, float* parts,
                              CudaStream stream) {
  const std::size_t columns = layout.columns;
  with_format(layout.format, [&](auto format) {
    using F = decltype(format);
    if (work.output != nullptr) {
      launch(stream, narrow_grid(rows), threads_for(columns), gradient_of_row<F>, work, columns);
    }
    if (parts != nullptr) {
      const dim3 grid(narrow_grid(ceil_divide(rows, rows_of_part)),
                      grid_row(ceil_divide(columns, kWarp)));
      launch(stream, grid, dim3(kWarp, kTileRows), column_sums<F>, work, columns, rows,
             rows_of_part, parts);
    }
  });
}

}  // namespace semitone::kernels
