#include "src/kernels/kernels.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

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

// relu looks at sign and magnitude: numbers are taken as the integers that their bits are, twice as
// many 16-bit ones a vector as after a conversion to fp32.
template <class Bits>
using Integers = hn::ScalableTag<Bits>;

template <class D>
HWY_INLINE hn::Vec<D> load_bits(D d, const hn::TFromD<D>* from, std::size_t count) {
  if (count == hn::Lanes(d)) return hn::LoadU(d, from);
  HWY_ALIGN hn::TFromD<D> padded[hn::MaxLanes(d)] = {};
  std::copy(from, from + count, padded);
  return hn::Load(d, padded);
}

template <class D>
HWY_INLINE void store_bits(D d, hn::Vec<D> bits, hn::TFromD<D>* to, std::size_t count) {
  if (count == hn::Lanes(d)) {
    hn::StoreU(bits, d, to);
    return;
  }
  HWY_ALIGN hn::TFromD<D> padded[hn::MaxLanes(d)];
  hn::Store(bits, d, padded);
  std::copy(padded, padded + count, to);
}

// Calls visit(i, count) for each vector of `size` elements; count is less than a vector's lanes at
// the end only.
template <class D, class Visit>
HWY_INLINE void for_vectors_of(D d, std::size_t size, const Visit& visit) {
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= size; i += lanes) visit(i, lanes);
  if (hn::MaxLanes(d) > 1 && i < size) visit(i, size - i);
}

// Integers over the bits of -infinity are positive numbers, 0, and NaNs of either sign; the least of
// all are the bits of -0.
template <class Bits>
void relu_bits(const void* in_bytes, void* out_bytes, std::size_t size, Bits minus_infinity) {
  const Integers<Bits> d;
  const auto* in = static_cast<const Bits*>(in_bytes);
  auto* out = static_cast<Bits*>(out_bytes);
  const auto minus_zero = hn::Set(d, hwy::LimitsMin<Bits>());
  for_vectors_of(d, size, [&](std::size_t i, std::size_t count) {
    const auto bits = load_bits(d, in + i, count);
    const auto kept = hn::Or(hn::Gt(bits, hn::Set(d, minus_infinity)), hn::Eq(bits, minus_zero));
    store_bits(d, hn::IfThenElseZero(kept, bits), out + i, count);
  });
}

template <class Bits>
void relu_gradient_bits(const void* grad_bytes, const void* result_bytes, void* out_bytes,
                        std::size_t size, Bits minus_infinity) {
  const Integers<Bits> d;
  const auto* grad = static_cast<const Bits*>(grad_bytes);
  const auto* result = static_cast<const Bits*>(result_bytes);
  auto* out = static_cast<Bits*>(out_bytes);
  for_vectors_of(d, size, [&](std::size_t i, std::size_t count) {
    const auto bits = load_bits(d, result + i, count);
    const auto kept =
        hn::AndNot(hn::Eq(bits, hn::Zero(d)), hn::Gt(bits, hn::Set(d, minus_infinity)));
    store_bits(d, hn::IfThenElseZero(kept, load_bits(d, grad + i, count)), out + i, count);
  });
}

constexpr std::int32_t kMinusInfinityFp32 = -0x00800000;
constexpr std::int16_t kMinusInfinityFp16 = -0x0400;
constexpr std::int16_t kMinusInfinityBf16 = -0x0080;

void relu(const void* in, void* out, Format format, std::size_t size) {
  switch (format) {
    case Format::fp32:
      return relu_bits(in, out, size, kMinusInfinityFp32);
    case Format::fp16:
      return relu_bits(in, out, size, kMinusInfinityFp16);
    case Format::bf16:
      return relu_bits(in, out, size, kMinusInfinityBf16);
  }
}

void relu_gradient(const void* grad, const void* result, void* out, Format format,
                   std::size_t size) {
  switch (format) {
    case Format::fp32:
      return relu_gradient_bits(grad, result, out, size, kMinusInfinityFp32);
    case Format::fp16:
      return relu_gradient_bits(grad, result, out, size, kMinusInfinityFp16);
    case Format::bf16:
      return relu_gradient_bits(grad, result, out, size, kMinusInfinityBf16);
  }
}

void add(const void* a_bytes, const void* b_bytes, void* out_bytes, Format format,
         std::size_t size) {
  with_format(format, [&](auto stored) {
    using F = decltype(stored);
    const auto* a = static_cast<const typename F::Stored*>(a_bytes);
    const auto* b = static_cast<const typename F::Stored*>(b_bytes);
    auto* out = static_cast<typename F::Stored*>(out_bytes);
    for_vectors(size, [&](std::size_t i, std::size_t count) {
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
