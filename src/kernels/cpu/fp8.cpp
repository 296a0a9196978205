#include "src/kernels/kernels.h"

#include <cstddef>
#include <cstdint>
#include <limits>

// Highway compiles this file once for each instruction set: the order of these lines matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/cpu/fp8.cpp"
#include <hwy/foreach_target.h>
#include "src/kernels/cpu/vec-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {

struct E4m3 {
  static constexpr float kMax = 448;
  static constexpr float kMinNormal = 0x1p-6F;
  static constexpr float kUnit = 0x1p-9F;  // the smallest subnormal number
  static constexpr int kDropped = 20;      // bits of fp32's mantissa
  static constexpr bool kHasInfinity = false;
};
struct E5m2 {
  static constexpr float kMax = 57344;
  static constexpr float kMinNormal = 0x1p-14F;
  static constexpr float kUnit = 0x1p-16F;
  static constexpr int kDropped = 21;
  static constexpr bool kHasInfinity = true;
};

HWY_INLINE auto is_finite(Vector magnitude) {
  return hn::Lt(magnitude, hn::Set(Float(), std::numeric_limits<float>::infinity()));
}

// The nearest number of the format to a magnitude.
template <class To>
HWY_INLINE Vector nearest(Vector magnitude) {
  const Float d;
  const hn::RebindToUnsigned<Float> bits_of;
  const auto limited = hn::Min(magnitude, hn::Set(d, To::kMax));
  const auto bits = hn::BitCast(bits_of, limited);
  constexpr std::uint32_t kUnitInLast = std::uint32_t{1} << To::kDropped;
  const auto lowest_kept = hn::And(hn::ShiftRight<To::kDropped>(bits), hn::Set(bits_of, 1));
  const auto rounded =
      hn::And(hn::Add(bits, hn::Add(lowest_kept, hn::Set(bits_of, kUnitInLast / 2 - 1))),
              hn::Set(bits_of, ~(kUnitInLast - 1)));
  // Subnormal: the addition itself rounds, since fp32's last place at this sum is the unit.
  const auto shift = hn::Set(d, To::kUnit * 0x1p23F);
  const auto subnormal = hn::Sub(hn::Add(limited, shift), shift);
  return hn::IfThenElse(hn::Lt(limited, hn::Set(d, To::kMinNormal)), subnormal,
                        hn::BitCast(d, rounded));
}

template <class From, class To>
float round_to_fp8_as(const void* bytes, float* out, std::size_t size, float scale) {
  const Float d;
  const auto factor = hn::Set(d, scale);
  const auto not_finite = hn::Set(d, std::numeric_limits<float>::quiet_NaN());
  const auto* in = static_cast<const typename From::Stored*>(bytes);
  auto largest = hn::Zero(d);
  for_vectors(size, [&](std::size_t i, std::size_t count) HWY_ATTR {
    prefetch(in + i);
    prefetch(out + i);
    const auto value = load_some(From{}, in + i, count);
    const auto magnitude = hn::Abs(value);
    largest = hn::Max(largest, hn::IfThenElseZero(is_finite(magnitude), magnitude));
    const auto scaled = hn::Mul(value, factor);
    const auto kept = hn::CopySign(nearest<To>(hn::Abs(scaled)), value);
    // A finite number whose product overflows fp32 has the largest number, too.
    const auto others = To::kHasInfinity ? scaled : not_finite;
    store_some(Fp32{}, hn::IfThenElse(is_finite(magnitude), kept, others), out + i, count);
  });
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

float round_to_fp8(const void* in, Format in_format, float* out, std::size_t size, float scale,
                   Fp8 format) {
  float largest = 0;
  with_format(in_format, [&](auto from) HWY_ATTR {
    largest = format == Fp8::e4m3 ? round_to_fp8_as<decltype(from), E4m3>(in, out, size, scale)
                                  : round_to_fp8_as<decltype(from), E5m2>(in, out, size, scale);
  });
  return largest;
}

template <class From>
float max_finite_magnitude_of(const void* bytes, std::size_t size) {
  const Float d;
  const auto* in = static_cast<const typename From::Stored*>(bytes);
  auto largest = hn::Zero(d);
  for_vectors(size, [&](std::size_t i, std::size_t count) HWY_ATTR {
    prefetch(in + i);
    const auto magnitude = hn::Abs(load_some(From{}, in + i, count));
    largest = hn::Max(largest, hn::IfThenElseZero(is_finite(magnitude), magnitude));
  });
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

float max_finite_magnitude(const void* in, Format format, std::size_t size) {
  float largest = 0;
  with_format(format, [&](auto from) HWY_ATTR {
    largest = max_finite_magnitude_of<decltype(from)>(in, size);
  });
  return largest;
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace semitone::kernels {

HWY_EXPORT(round_to_fp8);
HWY_EXPORT(max_finite_magnitude);

float round_to_fp8(const void* in, Format in_format, float* out, std::size_t size, float scale,
                   Fp8 format) {
  return HWY_DYNAMIC_DISPATCH(round_to_fp8)(in, in_format, out, size, scale, format);
}

float max_finite_magnitude(const void* in, Format format, std::size_t size) {
  return HWY_DYNAMIC_DISPATCH(max_finite_magnitude)(in, format, size);
}

}  // namespace semitone::kernels
#endif
