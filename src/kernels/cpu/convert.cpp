#include "src/kernels/kernels.h"

#include <cstddef>

// Highway compiles this file once for each instruction set: the order of these lines matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/cpu/convert.cpp"
#include <hwy/foreach_target.h>
#include "src/kernels/cpu/vec-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {

template <class In, class Out>
HWY_INLINE void convert_as(In in_format, Out out_format, const typename In::Stored* from,
                           typename Out::Stored* to, std::size_t size) {
  for_vectors(size, [&](std::size_t i, std::size_t count) HWY_ATTR {
    prefetch(from + i);
    prefetch(to + i);
    store_some(out_format, load_some(in_format, from + i, count), to + i, count);
  });
}

void convert(const void* in, Format in_format, void* out, Format out_format, std::size_t size) {
  with_format(in_format, [&](auto from) HWY_ATTR {
    with_format(out_format, [&](auto to) HWY_ATTR {
      convert_as(from, to, static_cast<const typename decltype(from)::Stored*>(in),
                 static_cast<typename decltype(to)::Stored*>(out), size);
    });
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
