#include "src/kernels/max_pool_kernel.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

// Highway compiles this file once for each instruction set: the order of these lines matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/cpu/max_pool.cpp"
#include <hwy/foreach_target.h>
#include "src/kernels/cpu/vec-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {

// Positions, in lanes of an element's size.
template <class D>
HWY_INLINE hn::Vec<D> load_places([[maybe_unused]] D d, const std::uint8_t* from,
                                  std::size_t count) {
  return hn::PromoteTo(d, load_first(hn::Rebind<std::uint8_t, D>(), from, count));
}

template <class D>
HWY_INLINE void store_places(D, hn::Vec<D> places, std::uint8_t* to, std::size_t count) {
  const hn::Rebind<std::uint8_t, D> bytes;
  store_first(bytes, hn::DemoteTo(bytes, places), to, count);
}

// Calls work(d) with the tag of F's bits whose vectors are the widest that `size` elements fill, of a
// whole vector, 32 or 16 bytes; else with that of 16 bytes.
template <class F, class Work>
HWY_INLINE void with_filled_vectors(std::size_t size, const Work& work) {
  using T = hn::TFromD<Bits<F>>;
  const hn::CappedTag<T, 32 / sizeof(T)> of_32_bytes;
  if (size >= hn::Lanes(Bits<F>())) return work(Bits<F>());
  if (size >= hn::Lanes(of_32_bytes)) return work(of_32_bytes);
  work(hn::CappedTag<T, 16 / sizeof(T)>());
}

// Calls visit(i, count) for vectors of `size` elements. Vectors that are not full go through memory,
// five times as slowly, so the last one begins early enough to be full, if `size` allows. Elements
// may be visited twice.
template <class D, class Visit>
HWY_INLINE void for_overlapping_vectors_of(D d, std::size_t size, const Visit& visit) {
  const std::size_t lanes = hn::Lanes(d);
  if (size < lanes) return visit(0, size);
  for (std::size_t i = 0; i < size; i += lanes) visit(std::min(i, size - lanes), lanes);
}

// Integers with the order of the values: equal for both zeros, and kNan, above all others, for
// NaNs. 16-bit values therefore need no conversion.
template <class T>
constexpr T kNan = std::numeric_limits<T>::max();

template <class F, class D>
HWY_INLINE hn::Vec<D> order_of(F, D d, hn::Vec<D> bits) {
  using T = hn::TFromD<D>;
  const auto magnitude = hn::And(bits, hn::Set(d, kNan<T>));  // all bits but the sign
  const auto sign = hn::BroadcastSignBit(bits);
  const auto order = hn::Sub(hn::Xor(magnitude, sign), sign);
  return hn::IfThenElse(hn::Gt(magnitude, hn::Set(d, kInfinityBits<F>)), hn::Set(d, kNan<T>),
                        order);
}

// The part of a window that is in the input: [begin, end) there, `skipped` positions after the
// window's first.
struct Span {
  std::size_t begin;
  std::size_t end;
  std::size_t skipped;
};

HWY_INLINE Span window_of(const PoolAxis& axis, std::size_t i) {
  const std::size_t first = i * axis.stride;  // in the padded input
  const std::size_t begin = std::max(first, axis.padding);
  const std::size_t end = std::min(first + axis.kernel, axis.input + axis.padding);
  return {begin - axis.padding, end - axis.padding, begin - first};
}

template <class F, bool kWithPlaces, class D>
void max_pool_rows(D d, const PoolLayout& layout, const void* input, void* output,
                   std::uint8_t* places, std::size_t begin, std::size_t end) {
  using T = hn::TFromD<D>;
  const std::size_t channels = layout.channels;
  const auto largest_number = hn::Set(d, kNan<T> - 1);
  for (std::size_t row = begin; row < end; ++row) {
    const std::size_t image = row / layout.height.output;
    const auto* plane = static_cast<const typename F::Stored*>(input) +
                        image * layout.height.input * layout.width.input * channels;
    const Span ys = window_of(layout.height, row % layout.height.output);
    for (std::size_t column = 0; column < layout.width.output; ++column) {
      const Span xs = window_of(layout.width, column);
      const std::size_t to = (row * layout.width.output + column) * channels;
      for_overlapping_vectors_of(d, channels, [&](std::size_t i, std::size_t n) SEMITONE_INLINE {
        const std::size_t first_place = ys.skipped * layout.width.kernel + xs.skipped;
        auto best =
            load_bits(F{}, d, plane + (ys.begin * layout.width.input + xs.begin) * channels + i, n);
        auto best_order = order_of(F{}, d, best);
        auto best_place = hn::Set(d, static_cast<T>(first_place));
        for (std::size_t y = ys.begin; y < ys.end; ++y) {
          const auto* from = plane + (y * layout.width.input + xs.begin) * channels + i;
          std::size_t place = first_place + (y - ys.begin) * layout.width.kernel;
          for (std::size_t x = xs.begin; x < xs.end; ++x, ++place, from += channels) {
            if (y + layout.height.stride >= ys.end && x + layout.width.stride >= xs.end)
              prefetch(from);  // what no window before this one has seen
            const auto bits = load_bits(F{}, d, from, n);
            const auto order = order_of(F{}, d, bits);
            const auto wins = hn::Gt(order, hn::Min(best_order, largest_number));
            best = hn::IfThenElse(wins, bits, best);
            best_order = hn::Max(order, best_order);
            if constexpr (kWithPlaces)
              best_place = hn::IfThenElse(wins, hn::Set(d, static_cast<T>(place)), best_place);
          }
        }
        store_bits(F{}, d, best, static_cast<typename F::Stored*>(output) + to + i, n);
        if constexpr (kWithPlaces) store_places(d, best_place, places + to + i, n);
      });
    }
  }
}

// The windows [begin, end) that contain an input's element.
struct Windows {
  std::size_t begin;
  std::size_t end;
};

HWY_INLINE Windows windows_of(const PoolAxis& axis, std::size_t i) {
  const std::size_t padded = i + axis.padding;
  const std::size_t begin = padded < axis.kernel ? 0 : (padded - axis.kernel) / axis.stride + 1;
  const std::size_t end = std::min(axis.output, padded / axis.stride + 1);
  return {begin, std::max(begin, end)};
}

// The position of an element in a window of one direction.
HWY_INLINE std::size_t place_in(const PoolAxis& axis, std::size_t window, std::size_t i) {
  return i + axis.padding - window * axis.stride;
}

// Stores the gradients of windows whose maximum is at this place, and 0 for the others.
template <class F, class D>
HWY_INLINE void store_chosen(F format, D d, hn::Vec<D> grad, hn::Vec<D> maxima, std::size_t place,
                             typename F::Stored* to, std::size_t count) {
  const auto chosen = hn::Eq(maxima, hn::Set(d, static_cast<hn::TFromD<D>>(place)));
  store_bits(format, d, hn::IfThenElseZero(chosen, grad), to, count);
}

// If windows do not overlap: copies each window's gradient to its maximum, and writes 0 elsewhere,
// in the order of memory.
template <class F, class D>
void backward_without_overlap(D d, const PoolLayout& layout, const typename F::Stored* grad,
                              const std::uint8_t* places, typename F::Stored* grad_input,
                              std::size_t begin, std::size_t end) {
  const PoolAxis& height = layout.height;
  const PoolAxis& width = layout.width;
  const std::size_t channels = layout.channels;
  for (std::size_t row = begin; row < end; ++row) {
    const std::size_t image = row / height.input;
    const std::size_t y = row % height.input;
    const Windows vs = windows_of(height, y);
    typename F::Stored* const to = grad_input + row * width.input * channels;
    std::size_t done = 0;  // columns
    const auto clear_up_to = [&](std::size_t column) {
      std::fill(to + done * channels, to + column * channels, typename F::Stored{});
    };
    if (vs.begin < vs.end) {
      const std::size_t first_place = place_in(height, vs.begin, y) * width.kernel;
      std::size_t from = (image * height.output + vs.begin) * width.output * channels;
      for (std::size_t u = 0; u < width.output; ++u, from += channels) {
        const Span xs = window_of(width, u);
        clear_up_to(xs.begin);
        for_overlapping_vectors_of(d, channels, [&](std::size_t i, std::size_t n) SEMITONE_INLINE {
          prefetch(grad + from + i);
          prefetch(places + from + i);
          const auto value = load_bits(F{}, d, grad + from + i, n);
          const auto maxima = load_places(d, places + from + i, n);
          std::size_t place = first_place + xs.skipped;
          for (std::size_t x = xs.begin; x < xs.end; ++x, ++place) {
            typename F::Stored* const element = to + x * channels + i;
            prefetch(element);
            store_chosen(F{}, d, value, maxima, place, element, n);
          }
        });
        done = xs.end;
      }
    }
    clear_up_to(width.input);
  }
}

// If windows overlap: adds up the gradients of the windows whose maximum an element is.
template <class F>
void backward_with_overlap(const PoolLayout& layout, const typename F::Stored* grad,
                           const std::uint8_t* places, typename F::Stored* grad_input,
                           std::size_t begin, std::size_t end) {
  const Bits<F> d;
  const Float f;
  const hn::RebindToSigned<Float> lanes;
  const PoolAxis& height = layout.height;
  const PoolAxis& width = layout.width;
  const std::size_t channels = layout.channels;
  struct Candidate {  // a window that contains the element
    std::size_t offset;
    std::size_t place;  // the element's in it
  };
  std::array<Candidate, kMostPlaces> candidates;
  // A division costs as much as the work on a vector.
  std::vector<Windows> columns;
  columns.reserve(width.input);
  for (std::size_t x = 0; x < width.input; ++x) columns.push_back(windows_of(width, x));
  for (std::size_t row = begin; row < end; ++row) {
    const std::size_t image = row / height.input;
    const std::size_t y = row % height.input;
    const Windows vs = windows_of(height, y);
    typename F::Stored* to = grad_input + row * width.input * channels;
    for (std::size_t x = 0; x < width.input; ++x, to += channels) {
      const Windows us = columns[x];
      std::size_t count = 0;
      for (std::size_t v = vs.begin; v < vs.end; ++v) {
        for (std::size_t u = us.begin; u < us.end; ++u) {
          candidates[count++] = {((image * height.output + v) * width.output + u) * channels,
                                 place_in(height, v, y) * width.kernel + place_in(width, u, x)};
        }
      }
      if (count == 0) {
        std::fill(to, to + channels, typename F::Stored{});
      } else if (count == 1) {
        const std::size_t from = candidates[0].offset;
        for_overlapping_vectors_of(d, channels, [&](std::size_t i, std::size_t n) SEMITONE_INLINE {
          prefetch(grad + from + i);
          prefetch(places + from + i);
          prefetch(to + i);
          store_chosen(F{}, d, load_bits(F{}, grad + from + i, n),
                       load_places(d, places + from + i, n), candidates[0].place, to + i, n);
        });
      } else {
        for_overlapping_vectors_of(f, channels, [&](std::size_t i, std::size_t n) SEMITONE_INLINE {
          prefetch(grad + candidates[count - 1].offset + i);
          prefetch(places + candidates[count - 1].offset + i);
          prefetch(to + i);
          auto sum = hn::Zero(f);
          for (std::size_t c = 0; c < count; ++c) {
            const std::size_t from = candidates[c].offset + i;
            const auto own = hn::Set(lanes, static_cast<std::int32_t>(candidates[c].place));
            const auto chosen =
                hn::RebindMask(f, hn::Eq(load_places(lanes, places + from, n), own));
            sum = hn::Add(sum, hn::IfThenElseZero(chosen, load_some(F{}, grad + from, n)));
          }
          store_some(F{}, sum, to + i, n);
        });
      }
    }
  }
}

void max_pool(const PoolLayout& layout, const void* input, void* output, std::uint8_t* places,
              std::size_t begin, std::size_t end) {
  with_format(layout.format, [&](auto format) {
    using F = decltype(format);
    with_filled_vectors<F>(layout.channels, [&](auto d) {
      places == nullptr ? max_pool_rows<F, false>(d, layout, input, output, places, begin, end)
                        : max_pool_rows<F, true>(d, layout, input, output, places, begin, end);
    });
  });
}

void max_pool_backward(const PoolLayout& layout, const void* grad, const std::uint8_t* places,
                       void* grad_input, std::size_t begin, std::size_t end) {
  const auto windows_are_disjoint = [](const PoolAxis& axis) { return axis.kernel <= axis.stride; };
  with_format(layout.format, [&](auto format) {
    using F = decltype(format);
    const auto* const from = static_cast<const typename F::Stored*>(grad);
    auto* const to = static_cast<typename F::Stored*>(grad_input);
    if (!windows_are_disjoint(layout.height) || !windows_are_disjoint(layout.width))
      return backward_with_overlap<F>(layout, from, places, to, begin, end);
    with_filled_vectors<F>(layout.channels, [&](auto d) {
      backward_without_overlap<F>(d, layout, from, places, to, begin, end);
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace semitone::kernels {

HWY_EXPORT(max_pool);
HWY_EXPORT(max_pool_backward);

void max_pool(const PoolLayout& layout, const void* input, void* output, std::uint8_t* places,
              std::size_t begin, std::size_t end) {
  HWY_DYNAMIC_DISPATCH(max_pool)(layout, input, output, places, begin, end);
}

void max_pool_backward(const PoolLayout& layout, const void* grad, const std::uint8_t* places,
                       void* grad_input, std::size_t begin, std::size_t end) {
  HWY_DYNAMIC_DISPATCH(max_pool_backward)(layout, grad, places, grad_input, begin, end);
}

}  // namespace semitone::kernels
#endif
