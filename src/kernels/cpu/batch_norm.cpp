#include "src/kernels/batch_norm_kernel.h"

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <vector>

// Highway compiles this file once for each instruction set: the order of these lines matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/cpu/batch_norm.cpp"
#include <hwy/foreach_target.h>
#include "src/kernels/cpu/vec-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {

// A term is in at most this many additions in fp32, one after the other, before fp64 takes over. The
// limit matters because rounding errors have one sign if all terms lack the same bits, as
// 16-bit values minus a mean do: 2730 such terms had an error of 3e-5 of their sizes, random ones
// 1e-8.
constexpr std::size_t kTerms = 256;
// The size of a block of rows, so that it is still in a cache when the moments read it again.
constexpr std::size_t kBlock = 8 * 1024;

// Number of rows that are summed together, so that channels' sums are loaded once for all of them.
constexpr std::size_t kTogether = 4;

// Calls visit(offset, length, number of rows as a type) for all rows of `width` of these elements, a
// few at a time. The last row may be shorter.
template <class Visit>
HWY_INLINE void for_rows(std::size_t elements, std::size_t width, const Visit& visit) {
  std::size_t at = 0;
  for (; at + kTogether * width <= elements; at += kTogether * width)
    visit(at, width, std::integral_constant<std::size_t, kTogether>());
  for (; at < elements; at += width)
    visit(at, std::min(width, elements - at), std::integral_constant<std::size_t, 1>());
}

// Number of rows that are processed as one. A short row wastes most of its last vector, costs a loop
// for few vectors, and each addition to a sum waits for the one before. A joined row has at least 64
// elements, a multiple of 16 (the fp32 lanes of AVX-512). With 16 channels this took 0.4 of the time.
HWY_INLINE std::size_t rows_in_one(const BatchLayout& layout) {
  constexpr std::size_t kFewest = 64;
  constexpr std::size_t kMostLanes = 16;
  if (!layout.channels_last || layout.channels >= kFewest) return 1;
  std::size_t rows = 1;
  while (rows * layout.channels < kFewest || rows * layout.channels % kMostLanes != 0) rows *= 2;
  return rows;
}

// Values of the channels, repeated for a number of rows.
class Repeated {
 public:
  Repeated(const float* values, std::size_t channels, std::size_t rows) : data_(values) {
    if (values == nullptr || rows == 1) return;
    memory_.reserve(rows * channels);
    for (std::size_t row = 0; row < rows; ++row)
      memory_.insert(memory_.end(), values, values + channels);
    data_ = memory_.data();
  }
  const float* data() const { return data_; }

 private:
  std::vector<float> memory_;
  const float* data_;
};

// Number of elements of a plane, or of rows, that are summed in fp32.
HWY_INLINE std::size_t plane_block() {
  return kTerms * hn::Lanes(Float());
}

HWY_INLINE std::size_t row_block(std::size_t channels) {
  return std::clamp<std::size_t>(kBlock / channels, 8, kTerms);
}

// A per-channel value for the elements of a piece: one for a whole plane, or one for each of a row.
class PlaneValue {
 public:
  PlaneValue(const float* values, std::size_t channel) : value_(values[channel]) {}
  HWY_INLINE Vector at(std::size_t, std::size_t) const { return hn::Set(Float(), value_); }

 private:
  float value_;  // no vector: a vector of Arm's SVE cannot be a member
};

class RowValue {
 public:
  RowValue(const float* values, std::size_t) : values_(values) {}
  HWY_INLINE Vector at(std::size_t i, std::size_t count) const {
    return load_some(Fp32{}, values_ + i, count);
  }

 private:
  const float* values_;
};

// The contribution of a plane or row to a channel.
struct Part {
  double count;
  double mean;
  double m2;
};

// The formula of Chan, Golub and LeVeque.
HWY_INLINE void merge(const Part& part, double& count, double& mean, double& m2) {
  const double both = count + part.count;
  const double delta = part.mean - mean;
  m2 += part.m2 + delta * delta * count * part.count / both;
  mean += delta * part.count / both;
  count = both;
}

// Around a mean that is rounded to fp32; its error, offset / count, is subtracted.
HWY_INLINE Part make_part(double count, float centre, double offset, double squares) {
  return {count, static_cast<double>(centre) + offset / count,
          std::max(0.0, squares - offset * offset / count)};
}

// Both of these for all channels of `count` rows.
HWY_INLINE void merge_rows(double count, const float* centre, const float* offset,
                           const float* squares, std::size_t channels,
                           const BatchMoments& moments) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> narrow;
  const std::size_t lanes = hn::Lanes(d);
  const auto counts = hn::Set(d, count);
  const auto fp64 = [&](const float* from)
                        HWY_ATTR { return hn::PromoteTo(d, hn::LoadU(narrow, from)); };
  std::size_t c = 0;
  for (; c + lanes <= channels; c += lanes) {
    const auto off = fp64(offset + c);
    const auto part_mean = hn::Add(fp64(centre + c), hn::Div(off, counts));
    const auto rest = hn::Sub(fp64(squares + c), hn::Div(hn::Mul(off, off), counts));
    const auto part_m2 = hn::IfThenElseZero(hn::Gt(rest, hn::Zero(d)), rest);
    const auto before = hn::LoadU(d, moments.count + c);
    const auto mean = hn::LoadU(d, moments.mean + c);
    const auto both = hn::Add(before, counts);
    const auto delta = hn::Sub(part_mean, mean);
    const auto weighted = hn::Mul(hn::Mul(hn::Mul(delta, delta), before), counts);
    const auto more = hn::Add(part_m2, hn::Div(weighted, both));
    hn::StoreU(hn::Add(hn::LoadU(d, moments.m2 + c), more), d, moments.m2 + c);
    hn::StoreU(hn::Add(mean, hn::Div(hn::Mul(delta, counts), both)), d, moments.mean + c);
    hn::StoreU(both, d, moments.count + c);
  }
  for (; c < channels; ++c) {
    merge(make_part(count, centre[c], static_cast<double>(offset[c]),
                    static_cast<double>(squares[c])),
          moments.count[c], moments.mean[c], moments.m2[c]);
  }
}

template <class F>
void plane_moments(const typename F::Stored* in, std::size_t size, double& count, double& mean,
                   double& m2) {
  const Float d;
  const std::size_t most = plane_block();
  for (std::size_t begin = 0; begin < size; begin += most) {
    const typename F::Stored* block = in + begin;
    const std::size_t length = std::min(most, size - begin);
    auto sum = hn::Zero(d);
    for_vectors(length, [&](std::size_t i, std::size_t n) {
      prefetch(block + i);
      sum = hn::Add(sum, load_some(F{}, block + i, n));
    });
    const float centre = hn::GetLane(hn::SumOfLanes(d, sum)) / static_cast<float>(length);
    const auto centres = hn::Set(d, centre);
    auto offset = hn::Zero(d);
    auto squares = hn::Zero(d);
    for_vectors(length, [&](std::size_t i, std::size_t n) {
      auto away = hn::Sub(load_some(F{}, block + i, n), centres);
      if (n < hn::Lanes(d)) away = hn::IfThenElseZero(hn::FirstN(d, n), away);
      offset = hn::Add(offset, away);
      squares = hn::Add(squares, hn::Mul(away, away));
    });
    merge(make_part(static_cast<double>(length), centre,
                    static_cast<double>(hn::GetLane(hn::SumOfLanes(d, offset))),
                    static_cast<double>(hn::GetLane(hn::SumOfLanes(d, squares)))),
          count, mean, m2);
  }
}

// Sums of each channel, from those of joined rows: with a block's, 191 additions at most.
HWY_INLINE void add_up_rows(std::vector<float>& sums, std::size_t channels) {
  for (std::size_t row = channels; row < sums.size(); row += channels) {
    for (std::size_t c = 0; c < channels; ++c) sums[c] += sums[row + c];
  }
}

template <class F>
void row_moments(const BatchLayout& layout, const typename F::Stored* in, std::size_t rows,
                 const BatchMoments& moments) {
  const std::size_t channels = layout.channels;
  const std::size_t in_one = rows_in_one(layout);
  const std::size_t width = in_one * channels;
  const std::size_t block = in_one * row_block(width);
  std::vector<float> centre(width);
  std::vector<float> offset(width);
  std::vector<float> squares(width);
  for (std::size_t begin = 0; begin < rows; begin += block) {
    const std::size_t count = std::min(block, rows - begin);
    const typename F::Stored* first = in + begin * channels;
    std::fill(centre.begin(), centre.end(), 0.0F);
    std::fill(offset.begin(), offset.end(), 0.0F);
    std::fill(squares.begin(), squares.end(), 0.0F);
    // Each of the two readings prefetches one half of the next block, so that memory is never idle.
    const std::size_t next = block * channels * sizeof(typename F::Stored);
    for_rows(count * channels, width, [&](std::size_t at, std::size_t length, auto together) {
      const typename F::Stored* from = first + at;
      for_vectors(length, [&](std::size_t i, std::size_t n) {
        auto sum = load_some(Fp32{}, centre.data() + i, n);
        for (std::size_t r = 0; r < together; ++r) {
          if (r % 2 == 0) prefetch(from + r * width + i, next);
          sum = hn::Add(sum, load_some(F{}, from + r * width + i, n));
        }
        store_some(Fp32{}, sum, centre.data() + i, n);
      });
    });
    add_up_rows(centre, channels);
    for (std::size_t c = 0; c < channels; ++c) centre[c] /= static_cast<float>(count);
    for (std::size_t c = channels; c < width; ++c) centre[c] = centre[c - channels];
    for_rows(count * channels, width, [&](std::size_t at, std::size_t length, auto together) {
      const typename F::Stored* from = first + at;
      for_vectors(length, [&](std::size_t i, std::size_t n) {
        const auto centres = load_some(Fp32{}, centre.data() + i, n);
        auto sum = load_some(Fp32{}, offset.data() + i, n);
        auto of_squares = load_some(Fp32{}, squares.data() + i, n);
        for (std::size_t r = 0; r < together; ++r) {
          if (r % 2 == 1) prefetch(from + r * width + i, next);
          const auto away = hn::Sub(load_some(F{}, from + r * width + i, n), centres);
          sum = hn::Add(sum, away);
          of_squares = hn::Add(of_squares, hn::Mul(away, away));
        }
        store_some(Fp32{}, sum, offset.data() + i, n);
        store_some(Fp32{}, of_squares, squares.data() + i, n);
      });
    });
    add_up_rows(offset, channels);
    add_up_rows(squares, channels);
    merge_rows(static_cast<double>(count), centre.data(), offset.data(), squares.data(), channels,
               moments);
  }
}

template <class F>
void moments_of(const BatchLayout& layout, const void* input, std::size_t begin, std::size_t end,
                const BatchMoments& moments) {
  const auto* in = static_cast<const typename F::Stored*>(input);
  if (layout.channels_last) {
    row_moments<F>(layout, in + begin * layout.channels, end - begin, moments);
    return;
  }
  for (std::size_t plane = begin; plane < end; ++plane) {
    const std::size_t c = plane % layout.channels;
    plane_moments<F>(in + plane * layout.length, layout.length, moments.count[c], moments.mean[c],
                     moments.m2[c]);
  }
}

// Calls visit(offset, channel, length) for pieces [begin, end): a plane, or rows_in_one rows, of which
// the last ones may be fewer. The channel is a plane's; that of rows is 0, without a meaning.
template <class Visit>
HWY_INLINE void for_pieces(const BatchLayout& layout, std::size_t begin, std::size_t end,
                           const Visit& visit) {
  const std::size_t in_one = rows_in_one(layout);
  for (std::size_t piece = begin; piece < end; piece += in_one) {
    visit(piece * layout.length, layout.channels_last ? 0 : piece % layout.channels,
          std::min(in_one, end - piece) * layout.length);
  }
}

template <class F, class Value>
void normalize_pieces(const BatchLayout& layout, const BatchNormalize& work, std::size_t begin,
                      std::size_t end) {
  const auto* input = static_cast<const typename F::Stored*>(work.input);
  const auto* residual = static_cast<const typename F::Stored*>(work.residual);
  auto* output = static_cast<typename F::Stored*>(work.output);
  const auto zero = hn::Zero(Float());
  const std::size_t in_one = rows_in_one(layout);
  const Repeated means(work.mean, layout.channels, in_one);
  const Repeated scales(work.scale, layout.channels, in_one);
  const Repeated shifts(work.shift, layout.channels, in_one);
  for_pieces(layout, begin, end, [&](std::size_t offset, std::size_t channel, std::size_t length) {
    const Value mean(means.data(), channel);
    const Value scale(scales.data(), channel);
    const Value shift(shifts.data(), channel);
    for_vectors(length, [&](std::size_t i, std::size_t n) {
      prefetch(input + offset + i);
      prefetch(output + offset + i);
      if (residual != nullptr) prefetch(residual + offset + i);
      auto v = hn::Sub(load_some(F{}, input + offset + i, n), mean.at(i, n));
      v = hn::Add(hn::Mul(v, scale.at(i, n)), shift.at(i, n));
      if (residual != nullptr) v = hn::Add(v, load_some(F{}, residual + offset + i, n));
      // Not Max, which would drop NaNs.
      if (work.relu) v = hn::IfThenElse(hn::Lt(v, zero), zero, v);
      store_some(F{}, v, output + offset + i, n);
    });
  });
}

// Where gradients count: everywhere, or where relu's result is positive or NaN. That is computed
// again, or, with a residual, read.
enum class Mask { none, computed, read };

// The tensors of a gradient at an offset.
template <class F>
struct GradientAt {
  using Stored = typename F::Stored;
  GradientAt(const BatchGradient& work, std::size_t offset)
      : grad(static_cast<const Stored*>(work.grad) + offset),
        input(static_cast<const Stored*>(work.input) + offset),
        result(work.result == nullptr ? nullptr : static_cast<const Stored*>(work.result) + offset),
        masked(work.masked == nullptr ? nullptr : static_cast<Stored*>(work.masked) + offset) {}
  const Stored* grad;
  const Stored* input;
  const Stored* result;
  Stored* masked;
};

// relu's gradient, where `away` is the input minus its mean. As normalize_pieces, which rounds its
// sum before it applies relu.
HWY_INLINE Vector masked_by(Vector grad, Vector away, Vector scale, Vector shift, float vanishes) {
  const Float d;
  const auto result = hn::Add(hn::Mul(away, scale), shift);
  return hn::IfThenZeroElse(hn::Le(result, hn::Set(d, vanishes)), grad);
}

// Adds the gradients of the n elements from i on to two sums.
template <class F, Mask kMask>
HWY_INLINE void add_gradient(const GradientAt<F>& at, std::size_t i, std::size_t n, Vector mean,
                             Vector scale, Vector shift, float vanishes, Vector& sum,
                             Vector& centred) {
  const Float d;
  prefetch(at.grad + i);
  prefetch(at.input + i);
  auto g = load_some(F{}, at.grad + i, n);
  const auto away = hn::Sub(load_some(F{}, at.input + i, n), mean);
  if constexpr (kMask == Mask::computed) g = masked_by(g, away, scale, shift, vanishes);
  if constexpr (kMask == Mask::read) {
    prefetch(at.result + i);
    g = hn::IfThenZeroElse(hn::Le(load_some(F{}, at.result + i, n), hn::Zero(d)), g);
    store_some(F{}, g, at.masked + i, n);
  }
  sum = hn::Add(sum, g);
  centred = hn::Add(centred, hn::Mul(g, away));
}

template <class F, Mask kMask>
void plane_gradient_sums(const BatchLayout& layout, const BatchGradient& work, std::size_t begin,
                         std::size_t end, double* sums, double* centred_sums) {
  const Float d;
  const std::size_t block = plane_block();
  const float vanishes = vanishing(layout.format);
  for_pieces(layout, begin, end, [&](std::size_t offset, std::size_t channel, std::size_t length) {
    const auto mean = hn::Set(d, work.mean[channel]);
    const auto scale = hn::Set(d, kMask == Mask::computed ? work.a[channel] : 0);
    const auto shift = hn::Set(d, kMask == Mask::computed ? work.shift[channel] : 0);
    for (std::size_t first = 0; first < length; first += block) {
      const GradientAt<F> at(work, offset + first);
      auto sum = hn::Zero(d);
      auto centred = hn::Zero(d);
      for_vectors(std::min(block, length - first), [&](std::size_t i, std::size_t n) {
        add_gradient<F, kMask>(at, i, n, mean, scale, shift, vanishes, sum, centred);
      });
      sums[channel] += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
      centred_sums[channel] += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, centred)));
    }
  });
}

// Row by row: the three or four tensors of several rows at a time are too many streams of memory,
// and took 1.2 to 1.4 times as long on an AMD processor.
template <class F, Mask kMask>
void row_gradient_sums(const BatchLayout& layout, const BatchGradient& work, std::size_t begin,
                       std::size_t end, double* sums, double* centred_sums) {
  const std::size_t channels = layout.channels;
  const std::size_t in_one = rows_in_one(layout);
  const std::size_t width = in_one * channels;
  const std::size_t block = in_one * row_block(width);
  const float vanishes = vanishing(layout.format);
  const Repeated means(work.mean, channels, in_one);
  const Repeated scales(work.a, channels, in_one);
  const Repeated shifts(work.shift, channels, in_one);
  std::vector<float> sum(width);
  std::vector<float> centred(width);
  for (std::size_t first = begin; first < end; first += block) {
    std::fill(sum.begin(), sum.end(), 0.0F);
    std::fill(centred.begin(), centred.end(), 0.0F);
    for_pieces(layout, first, std::min(end, first + block),
               [&](std::size_t offset, std::size_t, std::size_t length) {
                 const GradientAt<F> at(work, offset);
                 for_vectors(length, [&](std::size_t i, std::size_t n) {
                   const auto mean = load_some(Fp32{}, means.data() + i, n);
                   auto scale = hn::Zero(Float());
                   auto shift = scale;
                   if constexpr (kMask == Mask::computed) {
                     scale = load_some(Fp32{}, scales.data() + i, n);
                     shift = load_some(Fp32{}, shifts.data() + i, n);
                   }
                   auto of_grad = load_some(Fp32{}, sum.data() + i, n);
                   auto of_centred = load_some(Fp32{}, centred.data() + i, n);
                   add_gradient<F, kMask>(at, i, n, mean, scale, shift, vanishes, of_grad,
                                          of_centred);
                   store_some(Fp32{}, of_grad, sum.data() + i, n);
                   store_some(Fp32{}, of_centred, centred.data() + i, n);
                 });
               });
    for (std::size_t row = 0; row < width; row += channels) {
      for (std::size_t c = 0; c < channels; ++c) {
        sums[c] += static_cast<double>(sum[row + c]);
        centred_sums[c] += static_cast<double>(centred[row + c]);
      }
    }
  }
}

template <class F, Mask kMask>
void gradient_sums(const BatchLayout& layout, const BatchGradient& work, std::size_t begin,
                   std::size_t end, double* sums, double* centred_sums) {
  layout.channels_last
      ? row_gradient_sums<F, kMask>(layout, work, begin, end, sums, centred_sums)
      : plane_gradient_sums<F, kMask>(layout, work, begin, end, sums, centred_sums);
}

template <class F, class Value, bool kRelu>
void gradient_of_input_pieces(const BatchLayout& layout, const BatchGradient& work,
                              std::size_t begin, std::size_t end) {
  const auto* grad = static_cast<const typename F::Stored*>(work.grad);
  const auto* input = static_cast<const typename F::Stored*>(work.input);
  auto* output = static_cast<typename F::Stored*>(work.output);
  const float vanishes = vanishing(layout.format);
  const std::size_t in_one = rows_in_one(layout);
  const Repeated means(work.mean, layout.channels, in_one);
  const Repeated factors(work.a, layout.channels, in_one);
  const Repeated slopes(work.b, layout.channels, in_one);
  const Repeated constants(work.c, layout.channels, in_one);
  const Repeated shifts(kRelu ? work.shift : work.mean, layout.channels, in_one);
  for_pieces(layout, begin, end, [&](std::size_t offset, std::size_t channel, std::size_t length) {
    const Value mean(means.data(), channel);
    const Value a(factors.data(), channel);
    const Value b(slopes.data(), channel);
    const Value c(constants.data(), channel);
    const Value shift(shifts.data(), channel);
    for_vectors(length, [&](std::size_t i, std::size_t n) {
      prefetch(grad + offset + i);
      prefetch(input + offset + i);
      prefetch(output + offset + i);
      const auto away = hn::Sub(load_some(F{}, input + offset + i, n), mean.at(i, n));
      auto g = load_some(F{}, grad + offset + i, n);
      const auto factor = a.at(i, n);
      if constexpr (kRelu) g = masked_by(g, away, factor, shift.at(i, n), vanishes);
      const auto v = hn::Add(hn::Add(hn::Mul(away, b.at(i, n)), c.at(i, n)), hn::Mul(g, factor));
      store_some(F{}, v, output + offset + i, n);
    });
  });
}

template <class F, bool kRelu>
void gradient_of_input(const BatchLayout& layout, const BatchGradient& work, std::size_t begin,
                       std::size_t end) {
  layout.channels_last ? gradient_of_input_pieces<F, RowValue, kRelu>(layout, work, begin, end)
                       : gradient_of_input_pieces<F, PlaneValue, kRelu>(layout, work, begin, end);
}

void batch_moments(const BatchLayout& layout, const void* input, std::size_t begin, std::size_t end,
                   const BatchMoments& moments) {
  with_format(layout.format, [&](auto format) {
    moments_of<decltype(format)>(layout, input, begin, end, moments);
  });
}

void batch_normalize(const BatchLayout& layout, const BatchNormalize& work, std::size_t begin,
                     std::size_t end) {
  with_format(layout.format, [&](auto format) {
    using F = decltype(format);
    layout.channels_last ? normalize_pieces<F, RowValue>(layout, work, begin, end)
                         : normalize_pieces<F, PlaneValue>(layout, work, begin, end);
  });
}

void batch_gradient_sums(const BatchLayout& layout, const BatchGradient& work, std::size_t begin,
                         std::size_t end, double* sums, double* centred_sums) {
  with_format(layout.format, [&](auto format) {
    using F = decltype(format);
    if (work.result != nullptr) {
      gradient_sums<F, Mask::read>(layout, work, begin, end, sums, centred_sums);
    } else if (work.shift != nullptr) {
      gradient_sums<F, Mask::computed>(layout, work, begin, end, sums, centred_sums);
    } else {
      gradient_sums<F, Mask::none>(layout, work, begin, end, sums, centred_sums);
    }
  });
}

void batch_gradient_of_input(const BatchLayout& layout, const BatchGradient& work,
                             std::size_t begin, std::size_t end) {
  with_format(layout.format, [&](auto format) {
    using F = decltype(format);
    work.shift != nullptr ? gradient_of_input<F, true>(layout, work, begin, end)
                          : gradient_of_input<F, false>(layout, work, begin, end);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace semitone::kernels {

HWY_EXPORT(batch_moments);
HWY_EXPORT(batch_normalize);
HWY_EXPORT(batch_gradient_sums);
HWY_EXPORT(batch_gradient_of_input);

void batch_moments(const BatchLayout& layout, const void* input, std::size_t begin, std::size_t end,
                   const BatchMoments& moments) {
  HWY_DYNAMIC_DISPATCH(batch_moments)(layout, input, begin, end, moments);
}

void batch_normalize(const BatchLayout& layout, const BatchNormalize& work, std::size_t begin,
                     std::size_t end) {
  HWY_DYNAMIC_DISPATCH(batch_normalize)(layout, work, begin, end);
}

void batch_gradient_sums(const BatchLayout& layout, const BatchGradient& work, std::size_t begin,
                         std::size_t end, double* sums, double* centred_sums) {
  HWY_DYNAMIC_DISPATCH(batch_gradient_sums)(layout, work, begin, end, sums, centred_sums);
}

void batch_gradient_of_input(const BatchLayout& layout, const BatchGradient& work,
                             std::size_t begin, std::size_t end) {
  HWY_DYNAMIC_DISPATCH(batch_gradient_of_input)(layout, work, begin, end);
}

}  // namespace semitone::kernels
#endif
