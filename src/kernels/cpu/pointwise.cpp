#include "src/kernels/kernels.h"

#include <cstddef>

// Highway compiles this file once for each instruction set: the order of these lines matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/cpu/pointwise.cpp"
#include <hwy/foreach_target.h>
#include "src/kernels/cpu/vec-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {

// relu depends on sign and magnitude, which the integer representations have too. Integers above
// the bits of -infinity are positive numbers, 0, and NaNs of either sign; the smallest integer has
// the bits of -0.
template <class F>
constexpr hn::TFromD<Bits<F>> kMinusZero = hwy::LimitsMin<hn::TFromD<Bits<F>>>();
template <class F>
constexpr hn::TFromD<Bits<F>> kMinusInfinity = kMinusZero<F> + kInfinityBits<F>;

void relu(const void* in_bytes, void* out_bytes, Format format, std::size_t size) {
  with_format(format, [&](auto stored) {
    using F = decltype(stored);
    const Bits<F> d;
    const auto* in = static_cast<const typename F::Stored*>(in_bytes);
    auto* out = static_cast<typename F::Stored*>(out_bytes);
    for_vectors_of(d, size, [&](std::size_t i, std::size_t count) {
      const auto bits = load_bits(stored, in + i, count);
      const auto kept = hn::Or(hn::Gt(bits, hn::Set(d, kMinusInfinity<F>)),
                               hn::Eq(bits, hn::Set(d, kMinusZero<F>)));
      store_bits(stored, hn::IfThenElseZero(kept, bits), out + i, count);
    });
  });
}

void relu_gradient(const void* grad_bytes, const void* result_bytes, void* out_bytes, Format format,
                   std::size_t size) {
  with_format(format, [&](auto stored) {
    using F = decltype(stored);
    const Bits<F> d;
    const auto* grad = static_cast<const typename F::Stored*>(grad_bytes);
    const auto* result = static_cast<const typename F::Stored*>(result_bytes);
    auto* out = static_cast<typename F::Stored*>(out_bytes);
    for_vectors_of(d, size, [&](std::size_t i, std::size_t count) {
      const auto bits = load_bits(stored, result + i, count);
      const auto kept =
          hn::AndNot(hn::Eq(bits, hn::Zero(d)), hn::Gt(bits, hn::Set(d, kMinusInfinity<F>)));
      const auto gradient = load_bits(stored, grad + i, count);
      store_bits(stored, hn::IfThenElseZero(kept, gradient), out + i, count);
    });
  });
}

void add(const void* a_bytes, const void* b_bytes, void* out_bytes, Format format,
         std::size_t size) {
  with_format(format, [&](auto stored) {
    using F = decltype(stored);
    const auto* a = static_cast<const typename F::Stored*>(a_bytes);
    const auto* b = static_cast<const typename F::Stored*>(b_bytes);
    auto* out = static_cast<typename F::Stored*>(out_bytes);
    for_vectors(size, [&](std::size_t i, std::size_t count) {
      prefetch(a + i);
      prefetch(b + i);
      prefetch(out + i);
      store_some(stored, hn::Add(load_some(stored, a + i, count), load_some(stored, b + i, count)),
                 out + i, count);
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace semitone::kernels {

HWY_EXPORT(relu);
HWY_EXPORT(relu_gradient);
HWY_EXPORT(add);

void relu(const void* in, void* out, Format format, std::size_t size) {
  HWY_DYNAMIC_DISPATCH(relu)(in, out, format, size);
}

void relu_gradient(const void* grad, const void* result, void* out, Format format,
                   std::size_t size) {
  HWY_DYNAMIC_DISPATCH(relu_gradient)(grad, result, out, format, size);
}

void add(const void* a, const void* b, void* out, Format format, std::size_t size) {
  HWY_DYNAMIC_DISPATCH(add)(a, b, out, format, size);
}

}  // namespace semitone::kernels
#endif
