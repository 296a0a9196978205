#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/reduce.cuh"

#include <algorithm>

namespace semitone::kernels {
namespace {

// Beyond this bound both forms are x or 0 in fp32.
constexpr float kFar = 16;

constexpr float kRootHalf = 0x1.6a09e6p-1F;       // 1 / sqrt(2)
constexpr float kRootHalfRest = 0x1.99fcf0p-27F;  // less that

// P(X < x) of the standard normal distribution. In the tail the rounding of x / sqrt(2) alone would
// cause an error of 5e-6 at -10; erfc(a + lost) is erfc(a) (1 - 2 a lost) there.
__device__ float normal_below(float x) {
  const float a = x * -kRootHalf;
  const float below = 0.5F * erfcf(a);
  if (!(a > 1 && a < kFar)) return below;
  const float lost = fmaf(x, -kRootHalf, -a) - x * kRootHalfRest;
  return below - below * (2 * a * lost);
}

__device__ float erf_slope(float x) {
  const float near = fminf(fabsf(x), kFar);
  const float density = expf(near * near * -0.5F) * 0x1.988454p-2F;  // 1 / sqrt(2 pi)
  return normal_below(x) + x * density;
}

// x / 2 (1 + tanh(u)) = x / (1 + exp(-2u)): in e = exp(-|2u|), which does not overflow. 2u = x
// (kLinear + kCubic x^2).
constexpr float kLinear = 0x1.988454p+0F;  // 2 sqrt(2 / pi)
constexpr float kCubic = 0x1.2444f2p-4F;   // 0.044715 of that

struct Logistic {
  float square;  // of an x that is not too far
  float value;   // 1 / (1 + exp(-2u))
  float rest;    // 1 - value
};

__device__ Logistic logistic_at(float x) {
  const float near = x != x ? x : fmaxf(fminf(x, kFar), -kFar);
  const float square = near * near;
  const float argument = near * (square * kCubic + kLinear);
  const float e = expf(-fabsf(argument));
  const float larger = 1 / (1 + e);
  const float smaller = e * larger;
  return argument < 0 ? Logistic{square, smaller, larger} : Logistic{square, larger, smaller};
}

__device__ float value_at(GeluForm form, float x) {
  return form == GeluForm::erf ? x * normal_below(x) : x * logistic_at(x).value;
}

__device__ float slope_at(GeluForm form, float x) {
  if (form == GeluForm::erf) return erf_slope(x);
  const Logistic logistic = logistic_at(x);
  return x * (logistic.value * logistic.rest * (logistic.square * (3 * kCubic) + kLinear)) +
         logistic.value;
}

// Without bias and sums, elements have no columns. With them, a block covers kWarp columns and a
// part of the rows; a part has at most 256 rows, of which a thread processes 32.
struct Elements {
  std::size_t columns;
  std::size_t rows;
  std::size_t rows_of_part;
};

template <typename Visit>
__device__ void for_column(const Elements& elements, const Visit& visit) {
  const std::size_t column = std::size_t{blockIdx.y} * kWarp + threadIdx.x;
  const std::size_t stop = (std::size_t{blockIdx.x} + 1) * elements.rows_of_part;
  const std::size_t end = stop < elements.rows ? stop : elements.rows;
  if (column >= elements.columns) return;
  for (std::size_t row = blockIdx.x * elements.rows_of_part + threadIdx.y; row < end;
       row += kTileRows) {
    visit(row * elements.columns + column, column);
  }
}

template <typename Visit>
__device__ void for_all(std::size_t size, const Visit& visit) {
  const std::size_t step = std::size_t{gridDim.x} * kThreads;
  for (std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x; i < size; i += step)
    visit(i);
}

template <typename F>
__global__ void values(const __grid_constant__ Gelu work, std::size_t size) {
  for_all(size, [&](std::size_t i) {
    store<F>(value_at(work.form, load<F>(work.input, i)), work.output, i);
  });
}

template <typename F>
__global__ void values_with_bias(const __grid_constant__ Gelu work,
                                 const __grid_constant__ Elements elements) {
  for_column(elements, [&](std::size_t i, std::size_t column) {
    store<F>(value_at(work.form, load<F>(work.input, i) + work.bias[column]), work.output, i);
  });
}

template <typename F>
__global__ void gradients(const __grid_constant__ GeluGradient work, std::size_t size) {
  for_all(size, [&](std::size_t i) {
    store<F>(load<F>(work.grad, i) * slope_at(work.form, load<F>(work.input, i)), work.output, i);
  });
}

// parts: (parts, columns), or null.
template <typename F>
__global__ void gradients_by_column(const __grid_constant__ GeluGradient work,
                                    const __grid_constant__ Elements elements, float* parts) {
  float sum = 0;
  for_column(elements, [&](std::size_t i, std::size_t column) {
    float x = load<F>(work.input, i);
    if (work.bias != nullptr) x = x + work.bias[column];
    const float v = load<F>(work.grad, i) * slope_at(work.form, x);
    store<F>(v, work.output, i);
    sum += v;
  });
  if (parts == nullptr) return;
  const double all = column_sum(static_cast<double>(sum));
  const std::size_t column = std::size_t{blockIdx.y} * kWarp + threadIdx.x;
  if (column < elements.columns && threadIdx.y == 0)
    parts[blockIdx.x * elements.columns + column] = static_cast<float>(all);
}

// Four elements per thread, and more for very large tensors.
unsigned flat_grid(std::size_t size) {
  constexpr std::size_t kMost = 1 << 16;
  return static_cast<unsigned>(std::min(ceil_divide(size, 4 * std::size_t{kThreads}), kMost));
}

dim3 column_grid(const Elements& elements) {
  return dim3(narrow_grid(ceil_divide(elements.rows, elements.rows_of_part)),
              grid_row(ceil_divide(elements.columns, kWarp)));
}

constexpr dim3 kTile(kWarp, kTileRows);

}  // namespace

void gelu_cuda(const RowLayout& layout, const Gelu& work, std::size_t rows, CudaStream stream) {
  const Elements elements{layout.columns, rows, 4 * kTileRows};
  with_format(layout.format, [&](auto format) {
    using F = decltype(format);
    if (work.bias == nullptr) {
      const std::size_t size = rows * layout.columns;
      launch(stream, flat_grid(size), kThreads, values<F>, work, size);
    } else {
      launch(stream, column_grid(elements), kTile, values_with_bias<F>, work, elements);
    }
  });
}

void gelu_gradient_cuda(const RowLayout& layout, const GeluGradient& work, std::size_t rows,
                        std::size_t rows_of_part, float* parts, CudaStream stream) {
  const Elements elements{layout.columns, rows, rows_of_part};
  with_format(layout.format, [&](auto format) {
    using F = decltype(format);
    if (work.bias == nullptr && parts == nullptr) {
      const std::size_t size = rows * layout.columns;
      launch(stream, flat_grid(size), kThreads, gradients<F>, work, size);
    } else {
      launch(stream, column_grid(elements), kTile, gradients_by_column<F>, work, elements, parts);
    }
  });
}

}  // namespace semitone::kernels
