#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/fast_math.cuh"
#include "src/kernels/cuda/reduce.cuh"

#include <algorithm>
#include <type_traits>

namespace semitone::kernels {
namespace {

// Beyond this bound both forms are x or 0 in fp32.
constexpr float kFar = 16;

constexpr float kLog2E = 0x1.715476p+0F;

// exp(-x) for x >= 0. 16-bit formats: the argument is rounded once more, so the error is x 2^-24
// and that of exp2_of.
template <typename F>
__device__ float exp_of_negative(float x) {
  if constexpr (F::kFormat == Format::fp32) {
    return expf(-x);
  } else {
    return exp2_of(x * -kLog2E);
  }
}

// Of the standard normal distribution, at a >= 0.
struct Tail {
  float bell;   // exp(-a^2 / 2)
  float above;  // P(X > a)
};

// P(X > a) = exp(-a^2 / 2) R(a), where R falls from 1/2 like 1 / a. The tail therefore keeps its
// relative accuracy, and the density costs one multiplication. For fp32, R is a polynomial in
// (a - 3) / (a + 3), with an error of at most 1.1e-8 up to 14.6. For 16 bits it is one in
// t = 1 / (1 + 0.36 a), with an error of at most 8.8e-7 of its size up to 14; with the other
// roundings P is off by 1.5e-6 at 3 and by 4e-6 at 7, a hundredth of the result's rounding.
template <typename F>
__device__ Tail tail_at(float a) {
  if constexpr (F::kFormat == Format::fp32) {
    const float near = fminf(a, kFar);
    const float bell = expf(near * near * -0.5F);
    const float t = fmaf(near, 2 * inverse_of(near + 3), -1);
    const float ratio = polynomial(
        t, 0x1.f1b89cp-4F, -0x1.a6b66ap-3F, 0x1.f8baccp-4F, -0x1.7a9460p-5F, 0x1.91e020p-8F,
        0x1.7cb80ap-9F, -0x1.01e5d2p-10F, -0x1.6407bep-12F, 0x1.e44430p-14F, 0x1.c17076p-15F);
    return {bell, bell * ratio};
  } else {
    const float bell = exp2_of(a * a * (-0.5F * kLog2E));
    const float t = inverse_of(fmaf(a, 0.36F, 1));
    const float ratio =
        polynomial(t, 0.14371304491F, 0.141772462779F, 0.139719202237F, 0.0265495246041F,
                   0.18095369262F, -0.179764443856F, 0.0470562144128F);
    return {bell, bell * t * ratio};
  }
}

__device__ float below_from(float x, float above) {
  return x < 0 ? above : 1 - above;
}

// x / 2 (1 + tanh(u)) = x / (1 + exp(-2u)): in e = exp(-|2u|), which does not overflow. 2u = x
// (kLinear + kCubic x^2).
constexpr float kLinear = 0x1.988454p+0F;  // 2 sqrt(2 / pi)
constexpr float kCubic = 0x1.2444f2p-4F;   // 0.044715 of that

struct Logistic {
  float square;   // of an x that is not too far
  float larger;   // the larger one of 1 / (1 + exp(-2u)) and 1 - that
  float smaller;  // the other one
};

template <typename F>
__device__ Logistic logistic_at(float x) {
  const float near = fminf(fabsf(x), kFar);
  const float square = near * near;
  const float e = exp_of_negative<F>(near * fmaf(square, kCubic, kLinear));
  // Correctly rounded for fp32, so that a large x stays what it is.
  const float larger = F::kFormat == Format::fp32 ? 1 / (1 + e) : inverse_of(1 + e);
  return {square, larger, e * larger};
}

template <typename F, GeluForm kForm>
__device__ float value_at(float x) {
  if (kForm == GeluForm::erf) return x * below_from(x, tail_at<F>(fabsf(x)).above);
  const Logistic logistic = logistic_at<F>(x);
  return x * (x < 0 ? logistic.smaller : logistic.larger);
}

template <typename F, GeluForm kForm>
__device__ float slope_at(float x) {
  if (kForm == GeluForm::erf) {
    const Tail tail = tail_at<F>(fabsf(x));
    return fmaf(x, tail.bell * 0x1.988454p-2F, below_from(x, tail.above));  // 1 / sqrt(2 pi)
  }
  const Logistic logistic = logistic_at<F>(x);
  const float steep = logistic.smaller * logistic.larger;
  return fmaf(x, steep * fmaf(logistic.square, 3 * kCubic, kLinear),
              x < 0 ? logistic.smaller : logistic.larger);
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
    for (float& v : x) v = value_at<F, kForm>(v);
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
    for (unsigned k = 0; k < N; ++k) x[k] = value_at<F, kForm>(x[k] + bias[k]);
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
    for (unsigned k = 0; k < kCount; ++k) x[k] = grad[k] * slope_at<F, kForm>(x[k]);
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
      x[k] = grad[k] * slope_at<F, kForm>(x[k]);
      sum[k] += x[k];
    }
    store<F>(x, work.output, i);
  });
  if (parts == nullptr) return;
  double sums[N];
#pragma unroll
  for (unsigned k = 0; k < N; ++k) sums[k] = static_cast<double>(sum[k]);
  sum_columns(sums, kWarp);
  if (threadIdx.y != 0 || column >= elements.columns) return;
#pragma unroll
  for (unsigned k = 0; k < N; ++k)
    parts[blockIdx.x * elements.columns + column + k] = static_cast<float>(sums[k]);
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
