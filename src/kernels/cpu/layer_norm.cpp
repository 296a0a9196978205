#include "src/kernels/layer_norm_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

// Highway compiles this file once for each instruction set: the order of these lines matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/cpu/layer_norm.cpp"
#include <hwy/foreach_target.h>
#include "src/kernels/cpu/vec-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {

// A lane's sums over a row have at most this many terms before they continue in fp64.
constexpr std::size_t kTerms = 256;
// Number of vectors that are summed in parallel, since an addition takes four cycles.
constexpr std::size_t kChains = 4;
// Number of rows that the gradient processes together: their contributions to a column sum are
// added in a register.
constexpr std::size_t kTogether = 4;

// Prefetch distance of the gradient in bytes, to the next rows: the gradients when it first reads
// these rows, the inputs when it reads them again. If two arrays of a row do not fit in the
// first-level cache together with the next ones, they would evict each other, so nothing is
// prefetched then.
template <class F, std::size_t kRows>
HWY_INLINE std::size_t next_rows(std::size_t columns) {
  constexpr std::size_t kMost = 8 * 1024;
  const std::size_t size = kRows * columns * sizeof(typename F::Stored);
  return size <= kMost ? size : 0;
}

HWY_INLINE double sum_of_lanes(Vector v) {
  return static_cast<double>(hn::GetLane(hn::SumOfLanes(Float(), v)));
}

// The sums over i < size of the two numbers that terms(i, count, a, b) adds to a and b for a vector
// of elements; lanes from count on must get 0.
struct TwoSums {
  double a = 0;
  double b = 0;
};
template <class Terms>
HWY_INLINE TwoSums two_sums(std::size_t size, const Terms& terms) {
  const Float d;
  const std::size_t lanes = hn::Lanes(d);
  const std::size_t step = kChains * lanes;
  TwoSums sums;
  std::size_t i = 0;
  while (i + step <= size) {
    const std::size_t stop = i + std::min((size - i) / step, kTerms) * step;
    auto a0 = hn::Zero(d), a1 = a0, a2 = a0, a3 = a0;
    auto b0 = a0, b1 = a0, b2 = a0, b3 = a0;
    for (; i < stop; i += step) {
      terms(i, lanes, a0, b0);
      terms(i + lanes, lanes, a1, b1);
      terms(i + 2 * lanes, lanes, a2, b2);
      terms(i + 3 * lanes, lanes, a3, b3);
    }
    sums.a += sum_of_lanes(hn::Add(hn::Add(a0, a1), hn::Add(a2, a3)));
    sums.b += sum_of_lanes(hn::Add(hn::Add(b0, b1), hn::Add(b2, b3)));
  }
  if (i == size) return sums;
  auto a = hn::Zero(d);
  auto b = hn::Zero(d);
  for_vectors(size - i, [&](std::size_t j, std::size_t n) { terms(i + j, n, a, b); });
  sums.a += sum_of_lanes(a);
  sums.b += sum_of_lanes(b);
  return sums;
}

struct Moments {
  float mean;
  double variance;
};

// Reads the row twice, the second time from the cache. The first mean has the rounding errors of
// its sum. The sum of the deviations from it corrects that, and a row of equal numbers has variance
// 0.
template <class F>
HWY_INLINE Moments moments_of(const typename F::Stored* in, std::size_t columns) {
  const Float d;
  const auto size = static_cast<double>(columns);
  const double sum = two_sums(columns, [&](std::size_t i, std::size_t n, Vector& a, Vector&) {
                       prefetch(in + i);
                       a = hn::Add(a, load_some(F{}, in + i, n));
                     }).a;
  const auto centre = static_cast<float>(sum / size);
  const auto centres = hn::Set(d, centre);
  const TwoSums away =
      two_sums(columns, [&](std::size_t i, std::size_t n, Vector& offset, Vector& squares) {
        auto v = hn::Sub(load_some(F{}, in + i, n), centres);
        if (n < hn::Lanes(d)) v = hn::IfThenElseZero(hn::FirstN(d, n), v);
        offset = hn::Add(offset, v);
        squares = hn::MulAdd(v, v, squares);
      });
  // Not std::max, which would drop NaNs.
  const double variance = (away.b - away.a * away.a / size) / size;
  return {static_cast<float>(static_cast<double>(centre) + away.a / size),
          variance < 0 ? 0 : variance};
}

template <class F>
HWY_INLINE double mean_square_of(const typename F::Stored* in, std::size_t columns) {
  const TwoSums sums =
      two_sums(columns, [&](std::size_t i, std::size_t n, Vector& squares, Vector&) {
        prefetch(in + i);
        const auto v = load_some(F{}, in + i, n);
        squares = hn::MulAdd(v, v, squares);
      });
  return sums.a / static_cast<double>(columns);
}

template <class F, bool kCentred>
void normalize(std::size_t columns, const LayerNormalize& work, std::size_t begin,
               std::size_t end) {
  const Float d;
  for (std::size_t row = begin; row < end; ++row) {
    const auto* in = static_cast<const typename F::Stored*>(work.input) + row * columns;
    auto* out = static_cast<typename F::Stored*>(work.output) + row * columns;
    Moments moments{};
    if constexpr (kCentred) {
      moments = moments_of<F>(in, columns);
    } else {
      moments.variance = mean_square_of<F>(in, columns);
    }
    const auto rstd = static_cast<float>(1 / std::sqrt(moments.variance + work.eps));
    if (work.mean != nullptr) work.mean[row] = moments.mean;
    if (work.rstd != nullptr) work.rstd[row] = rstd;
    const auto means = hn::Set(d, moments.mean);
    const auto rstds = hn::Set(d, rstd);
    for_vectors(columns, [&](std::size_t i, std::size_t n) {
      prefetch(out + i);
      auto v = load_some(F{}, in + i, n);
      if constexpr (kCentred) v = hn::Sub(v, means);
      v = hn::MulAdd(hn::Mul(v, rstds), load_some(Fp32{}, work.weight + i, n),
                     load_some(Fp32{}, work.bias + i, n));
      store_some(F{}, v, out + i, n);
    });
  }
}

// The means over a row of g and g * a.
struct GradientMeans {
  double g = 0;
  double g_times_a = 0;
};

// The contribution of one row to the sums, at some of its columns.
template <class F, bool kCentred>
HWY_INLINE void add_row(std::size_t columns, const LayerNormGradient& work, std::size_t row,
                        std::size_t i, std::size_t n, std::size_t ahead, Vector weight,
                        Vector& g_sum, Vector& g_times_a_sum, Vector& weight_sum,
                        Vector& bias_sum) {
  const Float d;
  const std::size_t offset = row * columns + i;
  prefetch(static_cast<const typename F::Stored*>(work.grad) + offset, ahead);
  const auto grad_output =
      load_some(F{}, static_cast<const typename F::Stored*>(work.grad) + offset, n);
  auto a = load_some(F{}, static_cast<const typename F::Stored*>(work.input) + offset, n);
  if constexpr (kCentred) a = hn::Sub(a, hn::Set(d, work.mean[row]));
  a = hn::Mul(a, hn::Set(d, work.rstd[row]));
  const auto g = hn::Mul(grad_output, weight);
  g_sum = hn::Add(g_sum, g);
  g_times_a_sum = hn::MulAdd(g, a, g_times_a_sum);
  weight_sum = hn::MulAdd(grad_output, a, weight_sum);
  bias_sum = hn::Add(bias_sum, grad_output);
}

// For one row, or kTogether rows, from `row` on, whose contributions are added to the columns'
// sums.
template <class F, bool kCentred, std::size_t kRows>
HWY_INLINE void gradient_means(std::size_t columns, const LayerNormGradient& work, std::size_t row,
                               float* weight_sums, float* bias_sums, GradientMeans* means) {
  static_assert(kRows == 1 || kRows == 4);
  const Float d;
  const auto size = static_cast<double>(columns);
  const std::size_t block = kTerms * hn::Lanes(d);
  const std::size_t ahead = next_rows<F, kRows>(columns);
  for (std::size_t first = 0; first < columns; first += block) {
    // Not arrays: not every processor supports arrays of vectors.
    auto g0 = hn::Zero(d), g1 = g0, g2 = g0, g3 = g0;
    auto ga0 = g0, ga1 = g0, ga2 = g0, ga3 = g0;
    for_vectors(std::min(block, columns - first), [&](std::size_t offset, std::size_t n) {
      const std::size_t i = first + offset;
      const auto weight = load_some(Fp32{}, work.weight + i, n);
      auto weight_sum = hn::Zero(d);
      auto bias_sum = hn::Zero(d);
      add_row<F, kCentred>(columns, work, row, i, n, ahead, weight, g0, ga0, weight_sum, bias_sum);
      if constexpr (kRows > 1) {
        add_row<F, kCentred>(columns, work, row + 1, i, n, ahead, weight, g1, ga1, weight_sum,
                             bias_sum);
        add_row<F, kCentred>(columns, work, row + 2, i, n, ahead, weight, g2, ga2, weight_sum,
                             bias_sum);
        add_row<F, kCentred>(columns, work, row + 3, i, n, ahead, weight, g3, ga3, weight_sum,
                             bias_sum);
      }
      if (weight_sums == nullptr) return;
      store_some(Fp32{}, hn::Add(load_some(Fp32{}, weight_sums + i, n), weight_sum),
                 weight_sums + i, n);
      store_some(Fp32{}, hn::Add(load_some(Fp32{}, bias_sums + i, n), bias_sum), bias_sums + i, n);
    });
    const auto add_means = [&](std::size_t r, Vector g, Vector ga) {
      means[r].g += sum_of_lanes(g) / size;
      means[r].g_times_a += sum_of_lanes(ga) / size;
    };
    add_means(0, g0, ga0);
    if constexpr (kRows > 1) {
      add_means(1, g1, ga1);
      add_means(2, g2, ga2);
      add_means(3, g3, ga3);
    }
  }
}

template <class F, bool kCentred>
HWY_INLINE void gradient_of_row(std::size_t columns, const LayerNormGradient& work, std::size_t row,
                                std::size_t ahead, const GradientMeans& means) {
  const Float d;
  const auto* grad = static_cast<const typename F::Stored*>(work.grad) + row * columns;
  const auto* input = static_cast<const typename F::Stored*>(work.input) + row * columns;
  auto* output = static_cast<typename F::Stored*>(work.output) + row * columns;
  const double rstd = static_cast<double>(work.rstd[row]);
  const auto rstds = hn::Set(d, work.rstd[row]);
  const auto slope = hn::Set(d, static_cast<float>(-rstd * rstd * means.g_times_a));
  auto centre = hn::Zero(d);
  auto shift = hn::Zero(d);
  if constexpr (kCentred) {
    centre = hn::Set(d, work.mean[row]);
    shift = hn::Set(d, static_cast<float>(-rstd * means.g));
  }
  for_vectors(columns, [&](std::size_t i, std::size_t n) {
    prefetch(input + i, ahead);
    prefetch(output + i);
    const auto g = hn::Mul(load_some(F{}, grad + i, n), load_some(Fp32{}, work.weight + i, n));
    auto v = load_some(F{}, input + i, n);
    if constexpr (kCentred) {
      v = hn::MulAdd(hn::Sub(v, centre), slope, shift);
    } else {
      v = hn::Mul(v, slope);
    }
    store_some(F{}, hn::MulAdd(g, rstds, v), output + i, n);
  });
}

template <class F, bool kCentred, std::size_t kRows>
HWY_INLINE void gradient_of_rows(std::size_t columns, const LayerNormGradient& work,
                                 std::size_t row, float* weight_sums, float* bias_sums) {
  GradientMeans means[kRows];
  gradient_means<F, kCentred, kRows>(columns, work, row, weight_sums, bias_sums, means);
  if (work.output == nullptr) return;
  for (std::size_t r = 0; r < kRows; ++r)
    gradient_of_row<F, kCentred>(columns, work, row + r, next_rows<F, kRows>(columns), means[r]);
}

template <class F, bool kCentred>
void gradient(std::size_t columns, const LayerNormGradient& work, std::size_t begin,
              std::size_t end, float* weight_sums, float* bias_sums) {
  if (weight_sums != nullptr) {
    std::fill(weight_sums, weight_sums + columns, 0.0F);
    std::fill(bias_sums, bias_sums + columns, 0.0F);
  }
  std::size_t row = begin;
  for (; row + kTogether <= end; row += kTogether)
    gradient_of_rows<F, kCentred, kTogether>(columns, work, row, weight_sums, bias_sums);
  for (; row < end; ++row)
    gradient_of_rows<F, kCentred, 1>(columns, work, row, weight_sums, bias_sums);
}

void layer_normalize(const RowLayout& layout, const LayerNormalize& work, std::size_t begin,
                     std::size_t end) {
  with_format(layout.format, [&](auto format) {
    using F = decltype(format);
    work.centred ? normalize<F, true>(layout.columns, work, begin, end)
                 : normalize<F, false>(layout.columns, work, begin, end);
  });
}

void layer_norm_gradient(const RowLayout& layout, const LayerNormGradient& work, std::size_t begin,
                         std::size_t end, float* weight_sums, float* bias_sums) {
  with_format(layout.format, [&](auto format) {
    using F = decltype(format);
    work.centred ? gradient<F, true>(layout.columns, work, begin, end, weight_sums, bias_sums)
                 : gradient<F, false>(layout.columns, work, begin, end, weight_sums, bias_sums);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace semitone::kernels {

HWY_EXPORT(layer_normalize);
HWY_EXPORT(layer_norm_gradient);

void layer_normalize(const RowLayout& layout, const LayerNormalize& work, std::size_t begin,
                     std::size_t end) {
  HWY_DYNAMIC_DISPATCH(layer_normalize)(layout, work, begin, end);
}

void layer_norm_gradient(const RowLayout& layout, const LayerNormGradient& work, std::size_t begin,
                         std::size_t end, float* weight_sums, float* bias_sums) {
  HWY_DYNAMIC_DISPATCH(layer_norm_gradient)
  (layout, work, begin, end, weight_sums, bias_sums);
}

}  // namespace semitone::kernels
#endif
