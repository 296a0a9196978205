#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/reduce.cuh"

#include <algorithm>
#include <type_traits>

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
  const float lost = fmaf(x, -kRootHalf, -a) - x * kRootHalfRest;
  const float in_tail = below - below * (2 * a * lost);
  return a > 1 && a < kFar ? in_tail : below;
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

template <GeluForm kForm>
__device__ float value_at(float x) {
  return kForm == GeluForm::erf ? x * normal_below(x) : x * logistic_at(x).value;
}

template <GeluForm kForm>
__device__ float slope_at(float x) {
  if (kForm == GeluForm::erf) return erf_slope(x);
  const Logistic logistic = logistic_at(x);
  return x * (logistic.value * logistic.rest * (logistic.square * (3 * kCubic) + kLinear)) +
         logistic.value;
}

// With bias or sums, a block covers kWarp chunks of columns and a part of the rows; a part has at
// most 256 rows, of which a thread processes 32.
struct Elements {
  std::size_t columns;
  std::size_t rows;
  std::size_t rows_of_part;
};

// Calls visit(i) for the first elements of this thread's chunks of N columns, which begin at
// `column`.
template <typename Visit>
__device__ void for_rows(const Elements& elements, std::size_t column, const Visit& visit) {
  const std::size_t stop = (std::size_t{blockIdx.x} + 1) * elements.rows_of_part;
  const std::size_t end = stop < elements.rows ? stop : elements.rows;
  if (column >= elements.columns) return;
  for (std::size_t row = blockIdx.x * elements.rows_of_part + threadIdx.y; row < end;
       row += kTileRows) {
    visit(row * elements.columns + column);
  }
}

template <unsigned N>
__device__ std::size_t column_of_thread() {
  return (std::size_t{blockIdx.y} * kWarp + threadIdx.x) * N;
}

template <unsigned N>
__device__ void load_bias(const float* bias, std::size_t column, const Elements& elements,
                          float (&values)[N]) {
#pragma unroll
  for (unsigned k = 0; k < N; ++k)
    values[k] = bias != nullptr && column < elements.columns ? bias[column + k] : 0;
}

template <typename F, GeluForm kForm>
__global__ void __launch_bounds__(kThreads)
    values(const __grid_constant__ Gelu work, std::size_t size, std::size_t head) {
  const Share share{blockIdx.x * kThreads + threadIdx.x, gridDim.x * kThreads};
  for_chunks<kChunk>(0, size, head, share, [&](std::size_t i, auto count) {
    float x[decltype(count)::value];
    load<F>(work.input, i, x);
#pragma unroll
    for (float& v : x) v = value_at<kForm>(v);
    store<F>(x, work.output, i);
  });
}

template <typename F, GeluForm kForm, unsigned N>
__global__ void __launch_bounds__(kThreads)
    values_with_bias(const __grid_constant__ Gelu work, const __grid_constant__ Elements elements) {
  const std::size_t column = column_of_thread<N>();
  float bias[N];
  load_bias(work.bias, column, elements, bias);
  for_rows(elements, column, [&](std::size_t i) {
    float x[N];
    load<F>(work.input, i, x);
#pragma unroll
    for (unsigned k = 0; k < N; ++k) x[k] = value_at<kForm>(x[k] + bias[k]);
    store<F>(x, work.output, i);
  });
}

template <typename F, GeluForm kForm>
__global__ void __launch_bounds__(kThreads)
    gradients(const __grid_constant__ GeluGradient work, std::size_t size, std::size_t head) {
  const Share share{blockIdx.x * kThreads + threadIdx.x, gridDim.x * kThreads};
  for_chunks<kChunk>(0, size, head, share, [&](std::size_t i, auto count) {
    constexpr unsigned kCount = decltype(count)::value;
    float x[kCount];
    float grad[kCount];
    load<F>(work.input, i, x);
    load<F>(work.grad, i, grad);
#pragma unroll
    for (unsigned k = 0; k < kCount; ++k) x[k] = grad[k] * slope_at<kForm>(x[k]);
    store<F>(x, work.output, i);
  });
}

// parts: (parts, columns), or null.
template <typename F, GeluForm kForm, unsigned N>
__global__ void __launch_bounds__(kThreads)
    gradients_by_column(const __grid_constant__ GeluGradient work,
                        const __grid_constant__ Elements elements, float* parts) {
  const std::size_t column = column_of_thread<N>();
  float bias[N];
  load_bias(work.bias, column, elements, bias);
  float sum[N] = {};
  for_rows(elements, column, [&](std::size_t i) {
    float x[N];
    float grad[N];
    load<F>(work.input, i, x);
    load<F>(work.grad, i, grad);
#pragma unroll
    for (unsigned k = 0; k < N; ++k) {
      if (work.bias != nullptr) x[k] = x[k] + bias[k];
      x[k] = grad[k] * slope_at<kForm>(x[k]);
      sum[k] += x[k];
    }
    store<F>(x, work.output, i);
  });
  if (parts == nullptr) return;
#pragma unroll
  for (unsigned k = 0; k < N; ++k) {
    const double all = column_sum(static_cast<double>(sum[k]));
    if (column < elements.columns && threadIdx.y == 0)
      parts[blockIdx.x * elements.columns + column + k] = static_cast<float>(all);
  }
}

// A chunk per thread, and more for very large tensors.
unsigned flat_grid(std::size_t size) {
  constexpr std::size_t kMost = 1 << 16;
  return static_cast<unsigned>(std::min(ceil_divide(size, std::size_t{kChunk} * kThreads), kMost));
}

dim3 column_grid(const Elements& elements, unsigned chunk) {
  return dim3(narrow_grid(ceil_divide(elements.rows, elements.rows_of_part)),
              grid_row(ceil_divide(elements.columns, std::size_t{kWarp} * chunk)));
}

constexpr dim3 kTile(kWarp, kTileRows);

template <typename Work>
void with_form(GeluForm form, const Work& work) {
  if (form == GeluForm::erf) {
    work(std::integral_constant<GeluForm, GeluForm::erf>{});
  } else {
    work(std::integral_constant<GeluForm, GeluForm::tanh>{});
  }
}

}  // namespace

void gelu_cuda(const RowLayout& layout, const Gelu& work, std::size_t rows, CudaStream stream) {
  const std::size_t bytes = bytes_of(layout.format);
  const Head head = Head{}.add(work.input, bytes, kChunk).add(work.output, bytes, kChunk);
  with_format(layout.format, [&](auto format) {
    with_form(work.form, [&](auto form) {
      using F = decltype(format);
      constexpr GeluForm kForm = decltype(form)::value;
      if (work.bias == nullptr) {
        const std::size_t size = rows * layout.columns;
        launch(stream, flat_grid(size), kThreads, values<F, kForm>, work, size, head.elements());
        return;
      }
      const Elements elements{layout.columns, rows, 4 * kTileRows};
      with_chunk(layout.columns, head, [&](auto chunk) {
        constexpr unsigned kCount = decltype(chunk)::value;
        launch(stream, column_grid(elements, kCount), kTile, values_with_bias<F, kForm, kCount>,
               work, elements);
      });
    });
  });
}

void gelu_gradient_cuda(const RowLayout& layout, const GeluGradient& work, std::size_t rows,
                        std::size_t rows_of_part, float* parts, CudaStream stream) {
  const std::size_t bytes = bytes_of(layout.format);
  const Head head = Head{}
                        .add(work.input, bytes, kChunk)
                        .add(work.grad, bytes, kChunk)
                        .add(work.output, bytes, kChunk);
  with_format(layout.format, [&](auto format) {
    with_form(work.form, [&](auto form) {
      using F = decltype(format);
      constexpr GeluForm kForm = decltype(form)::value;
      if (work.bias == nullptr && parts == nullptr) {
        const std::size_t size = rows * layout.columns;
        launch(stream, flat_grid(size), kThreads, gradients<F, kForm>, work, size, head.elements());
        return;
      }
      const Elements elements{layout.columns, rows, rows_of_part};
      with_chunk(layout.columns, head, [&](auto chunk) {
        constexpr unsigned kCount = decltype(chunk)::value;
        launch(stream, column_grid(elements, kCount), kTile, gradients_by_column<F, kForm, kCount>,
               work, elements, parts);
      });
    });
  });
}

}  // namespace semitone::kernels
