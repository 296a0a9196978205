#include "src/kernels/cuda/held.cuh"
#include "src/kernels/cuda/layer_rows.cuh"

namespace semitone::kernels {
namespace {

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

// One block per row, for rows that are too long to be held. Reads them three times.
template <typename F>
__global__ void __launch_bounds__(kThreads)
    normalize_long_row(const __grid_constant__ LayerNormalize work, std::size_t columns) {
  const std::size_t row = blockIdx.x;
  const std::size_t first = row * columns;
  const Share share{threadIdx.x, kThreads};
  const std::size_t head_of_input = head_of_row<F>(first, work.input);
  // Calls visit(N neighbouring elements).
  const auto for_input = [&](const auto& visit) {
    for_chunks<kChunk>(first, first + columns, head_of_input, share,
                       [&](std::size_t i, auto count) {
                         float value[decltype(count)::value];
                         load<F>(work.input, i, value);
                         visit(value);
                       });
  };
  const double size = static_cast<double>(columns);
  float mean = 0;
  double variance = 0;
  if (work.centred) {
    // The first mean has the rounding errors of its sum. The sum of the
    // deviations from it corrects that, and a row of equal numbers has variance 0.
    PairSum own;
    for_input([&](const auto& value) { own.add(sum_of(value)); });
    const float centre = static_cast<float>(block_sum(own.total()) / size);
    PairSum own_offset;
    PairSum own_squares;
    for_input([&](auto& away) {
      for (float& one : away) one -= centre;
      own_offset.add(sum_of(away));
      for (float& one : away) one *= one;
      own_squares.add(sum_of(away));
    });
    const double offset = block_sum(own_offset.total());
    variance = (block_sum(own_squares.total()) - offset * offset / size) / size;
    if (variance < 0) variance = 0;  // NaN stays
    mean = static_cast<float>(static_cast<double>(centre) + offset / size);
  } else {
    PairSum own;
    for_input([&](auto& value) {
      for (float& one : value) one *= one;
      own.add(sum_of(value));
    });
    variance = block_sum(own.total()) / size;
  }
  const float rstd = static_cast<float>(1 / sqrt(variance + work.eps));
  if (threadIdx.x == 0) {
    if (work.mean != nullptr) work.mean[row] = mean;
    if (work.rstd != nullptr) work.rstd[row] = rstd;
  }
  const std::size_t head = head_of_row<F>(first, work.input, work.output);
  const OfColumns weights(work.weight, head);
  const OfColumns biases(work.bias, head);
  for_chunks<kChunk>(0, columns, head, share, [&](std::size_t i, auto count) {
    constexpr unsigned N = decltype(count)::value;
    float value[N];
    float weight[N];
    float bias[N];
    load<F>(work.input, first + i, value);
    weights.load_from(i, 1, weight);
    biases.load_from(i, 0, bias);
#pragma unroll
    for (unsigned k = 0; k < N; ++k) {
      if (work.centred) value[k] = value[k] - mean;
      value[k] = value[k] * rstd * weight[k];
      if (biases.exist()) value[k] = value[k] + bias[k];
    }
    store<F>(value, work.output, first + i);
  });
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

}  // namespace semitone::kernels
