#include "src/kernels/non_finite_kernel.h"

#include <cstddef>
#include <cstdint>

// Highway compiles this file once for each instruction set: the order of these lines matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/cpu/non_finite.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class Bits>
bool any_of(const void* bytes, std::size_t size, std::uint64_t mask, std::uint64_t value) {
  const auto* data = static_cast<const Bits*>(bytes);
  const hn::ScalableTag<Bits> d;
  const std::size_t lanes = hn::Lanes(d);
  const auto masks = hn::Set(d, static_cast<Bits>(mask));
  const auto values = hn::Set(d, static_cast<Bits>(value));
  const auto matches = [&](const Bits* from) {
    return hn::VecFromMask(d, hn::Eq(hn::And(hn::LoadU(d, from), masks), values));
  };
  // Two, so that one does not wait for the other.
  auto even = hn::Zero(d);
  auto odd = hn::Zero(d);
  std::size_t i = 0;
  for (; i + 2 * lanes <= size; i += 2 * lanes) {
    even = hn::Or(even, matches(data + i));
    odd = hn::Or(odd, matches(data + i + lanes));
  }
  bool found = !hn::AllTrue(d, hn::Eq(hn::Or(even, odd), hn::Zero(d)));
  for (; i < size; ++i)
    found = found || static_cast<Bits>(data[i] & static_cast<Bits>(mask)) == value;
  return found;
}

bool any_matches(const void* data, std::size_t size, std::size_t bytes, std::uint64_t mask,
                 std::uint64_t value) {
  switch (bytes) {
    case 1:
      return any_of<std::uint8_t>(data, size, mask, value);
    case 2:
      return any_of<std::uint16_t>(data, size, mask, value);
    case 4:
      return any_of<std::uint32_t>(data, size, mask, value);
    default:
      return any_of<std::uint64_t>(data, size, mask, value);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace semitone::kernels {

HWY_EXPORT(any_matches);

bool any_matches(const void* data, std::size_t size, std::size_t bytes, std::uint64_t mask,
                 std::uint64_t value) {
  return HWY_DYNAMIC_DISPATCH(any_matches)(data, size, bytes, mask, value);
}

}  // namespace semitone::kernels
#endif
