#include "src/kernels/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

// Highway compiles this file once for each instruction set: the order of these lines matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/cpu/norm.cpp"
#include <hwy/foreach_target.h>
#include "src/kernels/cpu/vec-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {

// Calls visit(vector) for all elements; zeros follow the last ones.
template <class In, class D, class Visit>
HWY_INLINE void for_each_vector(In format, D d, const void* bytes, std::size_t size,
                                const Visit& visit) {
  const std::size_t lanes = hn::Lanes(d);
  const auto* in = static_cast<const typename In::Stored*>(bytes);
  std::size_t i = 0;
  for (; i + lanes <= size; i += lanes) {
    prefetch(in + i);
    visit(load(format, d, in + i));
  }
  if (i < size) {
    HWY_ALIGN typename In::Stored tail[hn::MaxLanes(d)] = {};
    std::copy(in + i, in + size, tail);
    visit(load(format, d, tail));
  }
}

template <class In>
double sum_of_squares_of(const void* in, std::size_t size) {
  const hn::ScalableTag<float> d;
  auto lower = hn::Zero(hn::ScalableTag<double>());
  auto upper = lower;
  for_each_vector(In{}, d, in, size, [&](auto v) HWY_ATTR { add_squares(v, lower, upper); });
  return sum_of(lower, upper);
}

template <class In>
float max_magnitude_of(const void* in, std::size_t size) {
  const hn::ScalableTag<float> d;
  auto largest = hn::Zero(d);
  for_each_vector(In{}, d, in, size, [&](auto v) HWY_ATTR {
    const auto magnitude = hn::Abs(v);
    const auto larger = hn::Or(hn::Gt(magnitude, largest), hn::IsNaN(magnitude));
    largest = hn::IfThenElse(larger, magnitude, largest);
  });
  HWY_ALIGN float lanes[hn::MaxLanes(d)];
  hn::Store(largest, d, lanes);
  float result = 0;
  for (std::size_t i = 0; i < hn::Lanes(d); ++i)
    if (lanes[i] > result || std::isnan(lanes[i])) result = lanes[i];
  return result;
}

double sum_of_squares(const void* in, Format format, std::size_t size) {
  switch (format) {
    case Format::fp32:
      return sum_of_squares_of<Fp32>(in, size);
    case Format::fp16:
      return sum_of_squares_of<Fp16>(in, size);
    case Format::bf16:
      break;
  }
  return sum_of_squares_of<Bf16>(in, size);
}

float max_magnitude(const void* in, Format format, std::size_t size) {
  switch (format) {
    case Format::fp32:
      return max_magnitude_of<Fp32>(in, size);
    case Format::fp16:
      return max_magnitude_of<Fp16>(in, size);
    case Format::bf16:
      break;
  }
  return max_magnitude_of<Bf16>(in, size);
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace semitone::kernels {

HWY_EXPORT(sum_of_squares);
HWY_EXPORT(max_magnitude);

double sum_of_squares(const void* in, Format format, std::size_t size) {
  return HWY_DYNAMIC_DISPATCH(sum_of_squares)(in, format, size);
}

float max_magnitude(const void* in, Format format, std::size_t size) {
  return HWY_DYNAMIC_DISPATCH(max_magnitude)(in, format, size);
}

}  // namespace semitone::kernels
#endif
