// Vectors of fp32 from and to memory in any Format. Included once per target by Highway's
// foreach_target.
#if defined(SEMITONE_KERNELS_CPU_VEC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SEMITONE_KERNELS_CPU_VEC_INL_H_
#undef SEMITONE_KERNELS_CPU_VEC_INL_H_
#else
#define SEMITONE_KERNELS_CPU_VEC_INL_H_
#endif

#include "src/kernels/kernels.h"
#include "src/kernels/rounding.h"

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

// For a lambda in several loops, which a compiler might otherwise compile once, as a function.
#undef SEMITONE_INLINE
#define SEMITONE_INLINE HWY_ATTR __attribute__((always_inline))

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Memory formats as types.
struct Fp32 {
  using Stored = float;
};
struct Fp16 {
  using Stored = std::uint16_t;
};
struct Bf16 {
  using Stored = std::uint16_t;
};

template <class D>
HWY_INLINE hn::Vec<D> load(Fp32, D d, const float* from) {
  return hn::LoadU(d, from);
}

template <class D>
HWY_INLINE hn::Vec<D> load(Bf16, D d, const std::uint16_t* from) {
  const hn::Rebind<std::uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, from))));
}

// fp16 conversions in vectors: F16C on x86 from AVX2 on, and Arm. On older x86 Highway truncates
// where it should round, so the reference converts one element at a time there.
#undef SEMITONE_VECTOR_FP16
#if HWY_ARCH_ARM || (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2)
#define SEMITONE_VECTOR_FP16 1
#else
#define SEMITONE_VECTOR_FP16 0
#endif

template <class D>
HWY_INLINE hn::Vec<D> load(Fp16, [[maybe_unused]] D d, const std::uint16_t* from) {
#if SEMITONE_VECTOR_FP16
  const hn::Rebind<hwy::float16_t, D> d16;
  const hn::Rebind<std::uint16_t, D> du16;
  return hn::PromoteTo(d, hn::BitCast(d16, hn::LoadU(du16, from)));
#else
  HWY_ALIGN std::uint32_t bits[hn::MaxLanes(D())];
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) bits[i] = fp32_from_fp16(from[i]);
  return hn::BitCast(d, hn::Load(hn::RebindToUnsigned<D>(), bits));
#endif
}

template <class D>
HWY_INLINE void store(Fp32, [[maybe_unused]] D d, hn::Vec<D> v, float* to) {
  hn::StoreU(v, d, to);
}

// The bf16 nearest to each lane, ties to even, in the upper 16 bits; the lower ones have any value.
// Add half of the lost unit, and the lowest kept bit where it is a tie. The addition would carry a
// NaN's mantissa into its exponent and sign, so NaNs are made quiet instead.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> bf16_in_upper_half([[maybe_unused]] D d, hn::Vec<D> v) {
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::BitCast(d32, v);
  const auto lowest_kept = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1));
  const auto rounded = hn::Add(bits, hn::Add(lowest_kept, hn::Set(d32, 0x7FFF)));
  const auto quiet = hn::Or(bits, hn::Set(d32, 0x400000));
  return hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(v)), quiet, rounded);
}

template <class D>
HWY_INLINE void store(Bf16, D d, hn::Vec<D> v, std::uint16_t* to) {
  const hn::Rebind<std::uint16_t, D> d16;
  hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(bf16_in_upper_half(d, v))), d16, to);
}

template <class D>
HWY_INLINE void store(Fp16, [[maybe_unused]] D d, hn::Vec<D> v, std::uint16_t* to) {
#if SEMITONE_VECTOR_FP16
  const hn::Rebind<hwy::float16_t, D> d16;
  const hn::Rebind<std::uint16_t, D> du16;
  hn::StoreU(hn::BitCast(du16, hn::DemoteTo(d16, v)), du16, to);
#else
  HWY_ALIGN std::uint32_t bits[hn::MaxLanes(D())];
  hn::Store(hn::BitCast(hn::RebindToUnsigned<D>(), v), hn::RebindToUnsigned<D>(), bits);
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) to[i] = fp16_from_fp32(bits[i]);
#endif
}

// Processes memory of any size and format, a vector of fp32 at a time.
using Float = hn::ScalableTag<float>;
using Vector = hn::Vec<Float>;

// Loads `count` elements; the other lanes are 0.
template <class F>
HWY_INLINE Vector load_some(F format, const typename F::Stored* from, std::size_t count) {
  const Float d;
  if (count == hn::Lanes(d)) return load(format, d, from);
  HWY_ALIGN typename F::Stored padded[hn::MaxLanes(d)] = {};
  std::copy(from, from + count, padded);
  return load(format, d, padded);
}

template <class F>
HWY_INLINE void store_some(F format, Vector v, typename F::Stored* to, std::size_t count) {
  const Float d;
  if (count == hn::Lanes(d)) {
    store(format, d, v, to);
    return;
  }
  HWY_ALIGN typename F::Stored padded[hn::MaxLanes(d)];
  store(format, d, v, padded);
  std::copy(padded, padded + count, to);
}

// Adds the squares of a vector to two sums in fp64: a single one would wait for its last addition. A
// square is exact in fp64, so a fused multiplication and addition rounds like the two operations.
using WideVector = hn::Vec<hn::ScalableTag<double>>;
HWY_INLINE void add_squares(Vector v, WideVector& lower, WideVector& upper) {
  const hn::ScalableTag<double> wide;
#if HWY_TARGET == HWY_SCALAR
  const auto x = hn::PromoteTo(wide, v);
  const auto sum = hn::MulAdd(x, x, upper);
  upper = lower;
  lower = sum;
#else
  const hn::Half<Float> half;
  const auto x = hn::PromoteTo(wide, hn::LowerHalf(half, v));
  const auto y = hn::PromoteTo(wide, hn::UpperHalf(half, v));
  lower = hn::MulAdd(x, x, lower);
  upper = hn::MulAdd(y, y, upper);
#endif
}

HWY_INLINE double sum_of(WideVector lower, WideVector upper) {
  const hn::ScalableTag<double> wide;
  return hn::GetLane(hn::SumOfLanes(wide, hn::Add(lower, upper)));
}

// Processors prefetch by themselves, but not beyond a page of 4 KiB. Loops over large arrays
// therefore prefetch explicitly. 2 KiB ahead, most took 0.6 to 0.9 of the time, as with 4 KiB; with
// 1 KiB a little more. Prefetches beyond the end of the array have no effect.
constexpr std::size_t kBytesAhead = 2048;

HWY_INLINE void prefetch(const void* from, std::size_t bytes = kBytesAhead) {
  hwy::Prefetch(static_cast<const char*>(from) + bytes);
}

// Elements in their memory format, in vectors of integers of their size: twice as many 16-bit ones
// as after a conversion to fp32.
template <class F>
using Bits = hn::ScalableTag<
    std::conditional_t<sizeof(typename F::Stored) == 2, std::int16_t, std::int32_t>>;
template <class F>
using BitVector = hn::Vec<Bits<F>>;

template <class F>
constexpr hn::TFromD<Bits<F>> kInfinityBits =
    std::is_same_v<F, Fp32> ? 0x7F800000 : (std::is_same_v<F, Bf16> ? 0x7F80 : 0x7C00);

// Loads `count` numbers; the other lanes are 0.
template <class D>
HWY_INLINE hn::Vec<D> load_first(D d, const hn::TFromD<D>* from, std::size_t count) {
  if (count == hn::Lanes(d)) return hn::LoadU(d, from);
  HWY_ALIGN hn::TFromD<D> padded[hn::MaxLanes(D())] = {};
  std::memcpy(padded, from, count * sizeof(*from));
  return hn::Load(d, padded);
}

template <class D>
HWY_INLINE void store_first(D d, hn::Vec<D> v, hn::TFromD<D>* to, std::size_t count) {
  if (count == hn::Lanes(d)) {
    hn::StoreU(v, d, to);
    return;
  }
  HWY_ALIGN hn::TFromD<D> padded[hn::MaxLanes(D())];
  hn::Store(v, d, padded);
  std::memcpy(to, padded, count * sizeof(*to));
}

// The same of elements' bits, in vectors of integers of their size.
template <class F, class D>
HWY_INLINE hn::Vec<D> load_bits(F, D d, const typename F::Stored* from, std::size_t count) {
  return load_first(d, reinterpret_cast<const hn::TFromD<D>*>(from), count);
}

template <class F>
HWY_INLINE BitVector<F> load_bits(F format, const typename F::Stored* from, std::size_t count) {
  return load_bits(format, Bits<F>(), from, count);
}

template <class F, class D>
HWY_INLINE void store_bits(F, D d, hn::Vec<D> v, typename F::Stored* to, std::size_t count) {
  store_first(d, v, reinterpret_cast<hn::TFromD<D>*>(to), count);
}

template <class F>
HWY_INLINE void store_bits(F format, BitVector<F> v, typename F::Stored* to, std::size_t count) {
  store_bits(format, Bits<F>(), v, to, count);
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

// Of fp32.
template <class Visit>
HWY_INLINE void for_vectors(std::size_t size, const Visit& visit) {
  for_vectors_of(Float(), size, visit);
}

// Calls work with the format as a type.
template <class Work>
HWY_INLINE void with_format(Format format, const Work& work) {
  switch (format) {
    case Format::fp32:
      return work(Fp32{});
    case Format::fp16:
      return work(Fp16{});
    case Format::bf16:
      return work(Bf16{});
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#endif  // include toggle
