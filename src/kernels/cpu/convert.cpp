#include "src/kernels/kernels.h"

#include <cstddef>

// Highway compiles this file once for each instruction set: the order of these lines matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/cpu/convert.cpp"
#include <hwy/foreach_target.h>
#include "src/kernels/cpu/vec-inl.h"
#include <hwy/cache_control.h>
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {

// Processors look ahead up to the end of a page only: update-inl.h.
constexpr std::size_t kAhead = 2048;  // bytes

template <class In, class Out>
HWY_INLINE void convert_as(In in_format, Out out_format, const void* in, void* out,
                           std::size_t size) {
  const auto* const from = static_cast<const typename In::Stored*>(in);
  auto* const to = static_cast<typename Out::Stored*>(out);
  for_vectors(size, [&](std::size_t i, std::size_t count) HWY_ATTR {
    hwy::Prefetch(static_cast<const char*>(in) + i * sizeof(*from) + kAhead);
    hwy::Prefetch(static_cast<const char*>(out) + i * sizeof(*to) + kAhead);
    store_some(out_format, load_some(in_format, from + i, count), to + i, count);
  });
}

void convert(const void* in, Format in_format, void* out, Format out_format, std::size_t size) {
  with_format(in_format, [&](auto from) HWY_ATTR {
    with_format(out_format, [&](auto to) HWY_ATTR { convert_as(from, to, in, out, size); });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace semitone::kernels {

HWY_EXPORT(convert);

void convert(const void* in, Format in_format, void* out, Format out_format, std::size_t size) {
  HWY_DYNAMIC_DISPATCH(convert)(in, in_format, out, out_format, size);
}

}  // namespace semitone::kernels
#endif
