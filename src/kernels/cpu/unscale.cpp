#include "src/kernels/kernels.h"

#include <algorithm>
#include <cstddef>

// Highway compiles this file once for each instruction set: the order of these lines matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/cpu/unscale.cpp"
#include <hwy/foreach_target.h>
#include "src/kernels/cpu/vec-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {

template <class In, class Out>
bool unscale_elements(const void* in_bytes, const void* addend_bytes, void* out_bytes,
                      std::size_t size, float scale) {
  const hn::ScalableTag<float> d;
  const auto* in = static_cast<const typename In::Stored*>(in_bytes);
  const auto* addend = static_cast<const typename Out::Stored*>(addend_bytes);
  auto* out = static_cast<typename Out::Stored*>(out_bytes);
  const auto inv_scale = hn::Set(d, scale);
  const std::size_t lanes = hn::Lanes(d);
  // x - x is 0 for a finite x and NaN otherwise. Its sum keeps a NaN, so one test at the end
  // suffices. The stored value is tested, since rounding to fp16 can overflow.
  auto poison = hn::Zero(d);
  const auto check = [](auto v) { return hn::Sub(v, v); };
  const auto step = [&](const typename In::Stored* from, const typename Out::Stored* plus,
                        typename Out::Stored* to) {
    const auto product = hn::Mul(load(In{}, d, from), inv_scale);
    if (plus == nullptr) {
      store(Out{}, d, product, to);
      poison = hn::Add(poison, check(load(Out{}, d, to)));
      return;
    }
    const auto added = load(Out{}, d, plus);  // before `to`, which may be the same, is written
    store(Out{}, d, hn::Add(product, added), to);
    const auto sum = hn::IfThenZeroElse(hn::IsNaN(check(added)), check(load(Out{}, d, to)));
    poison = hn::Add(poison, hn::Add(check(product), sum));
  };
  std::size_t i = 0;
  for (; i + lanes <= size; i += lanes) {
    prefetch(in + i);
    if (addend != nullptr) prefetch(addend + i);
    prefetch(out + i);
    step(in + i, addend == nullptr ? nullptr : addend + i, out + i);
  }
  if (i < size) {
    HWY_ALIGN typename In::Stored in_tail[hn::MaxLanes(d)] = {};
    HWY_ALIGN typename Out::Stored addend_tail[hn::MaxLanes(d)] = {};
    HWY_ALIGN typename Out::Stored out_tail[hn::MaxLanes(d)] = {};
    std::copy(in + i, in + size, in_tail);
    if (addend != nullptr) std::copy(addend + i, addend + size, addend_tail);
    step(in_tail, addend == nullptr ? nullptr : addend_tail, out_tail);
    std::copy(out_tail, out_tail + (size - i), out + i);
  }
  return !hn::AllFalse(d, hn::IsNaN(poison));
}

bool unscale(const void* in, Format in_format, const void* addend, void* out, Format out_format,
             std::size_t size, float inv_scale) {
  if (out_format == Format::fp32) {
    switch (in_format) {
      case Format::fp32:
        return unscale_elements<Fp32, Fp32>(in, addend, out, size, inv_scale);
      case Format::fp16:
        return unscale_elements<Fp16, Fp32>(in, addend, out, size, inv_scale);
      case Format::bf16:
        return unscale_elements<Bf16, Fp32>(in, addend, out, size, inv_scale);
    }
  }
  return out_format == Format::fp16
             ? unscale_elements<Fp16, Fp16>(in, addend, out, size, inv_scale)
             : unscale_elements<Bf16, Bf16>(in, addend, out, size, inv_scale);
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace semitone::kernels {

HWY_EXPORT(unscale);

bool unscale(const void* in, Format in_format, const void* addend, void* out, Format out_format,
             std::size_t size, float inv_scale) {
  return HWY_DYNAMIC_DISPATCH(unscale)(in, in_format, addend, out, out_format, size, inv_scale);
}

}  // namespace semitone::kernels
#endif
