// Walking over an UpdateSpan, a vector at a time. Included once per target by Highway's
// foreach_target.
#if defined(SEMITONE_KERNELS_CPU_UPDATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SEMITONE_KERNELS_CPU_UPDATE_INL_H_
#undef SEMITONE_KERNELS_CPU_UPDATE_INL_H_
#else
#define SEMITONE_KERNELS_CPU_UPDATE_INL_H_
#endif

#include "src/kernels/cpu/vec-inl.h"
#include "src/kernels/updates.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {

// Formats are checked again for each vector. A branch that always goes the same way costs a cycle,
// while a vector of Adam's operands takes more than a hundred to arrive from memory. A template
// over all formats would need 27 copies of each rule for each instruction set.
template <class D>
HWY_INLINE hn::Vec<D> load(Format format, D d, const void* from, std::size_t i) {
  switch (format) {
    case Format::fp32:
      return load(Fp32{}, d, static_cast<const float*>(from) + i);
    case Format::fp16:
      return load(Fp16{}, d, static_cast<const std::uint16_t*>(from) + i);
    case Format::bf16:
      break;
  }
  return load(Bf16{}, d, static_cast<const std::uint16_t*>(from) + i);
}

template <class D>
HWY_INLINE void store(Format format, D d, hn::Vec<D> v, void* to, std::size_t i) {
  switch (format) {
    case Format::fp32:
      return store(Fp32{}, d, v, static_cast<float*>(to) + i);
    case Format::fp16:
      return store(Fp16{}, d, v, static_cast<std::uint16_t*>(to) + i);
    case Format::bf16:
      return store(Bf16{}, d, v, static_cast<std::uint16_t*>(to) + i);
  }
}

// rounding.h's split_fp32 and join_fp32.
template <class D>
HWY_INLINE hn::Vec<D> load_split(D d, const std::uint16_t* high, const std::uint16_t* low) {
  const hn::Rebind<std::uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto upper = hn::PromoteTo(d32, hn::LoadU(d16, high));
  const auto lower = hn::PromoteTo(d32, hn::LoadU(d16, low));
  const auto borrow = hn::ShiftRight<15>(lower);
  const auto joined = hn::Or(hn::ShiftLeft<16>(hn::Sub(upper, borrow)), lower);
  const auto zero = hn::Zero(d32);
  const auto is_zero = hn::Eq(hn::And(upper, hn::Set(d32, 0x7FFF)), zero);
  const auto below_zero = hn::And(is_zero, hn::Ne(borrow, zero));
  return hn::BitCast(d, hn::IfThenElse(below_zero, hn::ShiftLeft<16>(upper), joined));
}

template <class D>
HWY_INLINE void store_split(D /*d*/, hn::Vec<D> v, std::uint16_t* high, std::uint16_t* low) {
  const hn::Rebind<std::uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto is_nan = hn::RebindMask(d32, hn::IsNaN(v));
  auto bits = hn::BitCast(d32, v);
  const auto quiet = hn::And(hn::Or(bits, hn::Set(d32, 0x400000)), hn::Set(d32, 0xFFFF0000));
  bits = hn::IfThenElse(is_nan, quiet, bits);
  const auto upper = hn::ShiftRight<16>(hn::Add(bits, hn::Set(d32, 0x8000)));
  hn::StoreU(hn::TruncateTo(d16, upper), d16, high);
  hn::StoreU(hn::TruncateTo(d16, hn::And(bits, hn::Set(d32, 0xFFFF))), d16, low);
}

template <class D>
HWY_INLINE hn::Vec<D> load_state(D d, const UpdateSpan& span, std::size_t k, std::size_t i) {
  return load(span.state_format, d, span.state[k], i);
}

// updates.h's flush_subnormal. On integers: a comparison of subnormal numbers may be slow as
// well.
template <class D>
HWY_INLINE hn::Vec<D> flush_subnormal(D d, hn::Vec<D> v) {
  const hn::RebindToUnsigned<D> d32;
  const auto exponent = hn::And(hn::BitCast(d32, v), hn::Set(d32, 0x7F800000));
  return hn::IfThenZeroElse(hn::RebindMask(d, hn::Eq(exponent, hn::Zero(d32))), v);
}

// Rounded to nearest, if the state is not fp32.
template <class D>
HWY_INLINE void store_state(D d, hn::Vec<D> v, const UpdateSpan& span, std::size_t k,
                            std::size_t i) {
  store(span.state_format, d, v, span.state[k], i);
}

// Random bits for the elements from i on, rounding.h's hash_bits.
template <class D, class D32 = hn::RebindToUnsigned<D>>
HWY_INLINE hn::Vec<D32> random_bits(D /*d*/, const UpdateSpan& span, std::size_t i) {
  const D32 d32;
  const auto first = hn::Set(d32, span.first_element + static_cast<std::uint32_t>(i));
  const auto number = hn::Add(first, hn::Iota(d32, 0));
  auto x = hn::Xor(number, hn::Set(d32, span.seed));
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), hn::Set(d32, 0x85EBCA6B));
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<13>(x)), hn::Set(d32, 0xC2B2AE35));
  return hn::Xor(x, hn::ShiftRight<16>(x));
}

// rounding.h's bf16_from_fp32_stochastic; `random` is below 2^16.
template <class D>
HWY_INLINE void store_stochastic(D /*d*/, hn::Vec<D> v, hn::Vec<hn::RebindToUnsigned<D>> random,
                                 void* to, std::size_t i) {
  const hn::RebindToUnsigned<D> d32;
  const hn::Rebind<std::uint16_t, D> d16;
  const auto bits = hn::BitCast(d32, v);
  const auto quiet = hn::Or(bits, hn::Set(d32, 0x400000));
  const auto is_nan = hn::RebindMask(d32, hn::IsNaN(v));
  const auto rounded = hn::IfThenElse(is_nan, quiet, hn::Add(bits, random));
  hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(rounded)), d16,
             static_cast<std::uint16_t*>(to) + i);
}

// State 0 and, with `second`, state 1, as the next step will read them.
template <class D>
HWY_INLINE void store_moments(D d, const UpdateSpan& span, std::size_t i, hn::Vec<D> first,
                              const hn::Vec<D>* second = nullptr) {
  if (span.state_format == Format::fp32) {
    store_state(d, first, span, 0, i);
    if (second != nullptr) store_state(d, *second, span, 1, i);
    return;
  }
  const hn::RebindToUnsigned<D> d32;
  const auto random = random_bits(d, span, i);
  store_stochastic(d, first, hn::And(random, hn::Set(d32, 0xFFFF)), span.state[0], i);
  if (second != nullptr) store_stochastic(d, *second, hn::ShiftRight<16>(random), span.state[1], i);
}

template <class D>
HWY_INLINE hn::Vec<D> load_param(D d, const UpdateSpan& span, std::size_t i) {
  if (span.low == nullptr) return load(span.param_format, d, span.param, i);
  return load_split(d, static_cast<const std::uint16_t*>(span.param) + i, span.low + i);
}

template <class D>
HWY_INLINE void store_param(D d, hn::Vec<D> v, const UpdateSpan& span, std::size_t i) {
  if (span.low == nullptr) {
    store(span.param_format, d, v, span.param, i);
  } else {
    store_split(d, v, static_cast<std::uint16_t*>(span.param) + i, span.low + i);
  }
  if (span.copy != nullptr) store(span.copy_format, d, v, span.copy, i);
}

// The elements after the last whole vector, in memory of a vector's size, so that one code serves
// both. Lanes without an element are 0.
class SpanTail {
 public:
  SpanTail(const UpdateSpan& whole, std::size_t begin) : whole_(whole), begin_(begin) {
    inner_ = whole;
    inner_.size = whole.size - begin;
    inner_.first_element = whole.first_element + static_cast<std::uint32_t>(begin);
    take(param_, whole.param, bytes_of(whole.param_format));
    if (whole.grad != nullptr) {
      take(grad_, whole.grad, bytes_of(whole.grad_format));
      inner_.grad = grad_;
    }
    inner_.param = param_;
    if (whole.low != nullptr) {
      take(low_, whole.low, sizeof(*low_));
      inner_.low = low_;
    }
    if (whole.copy != nullptr) inner_.copy = copy_;
    for (std::size_t k = 0; k < kStates; ++k) {
      if (whole.state[k] == nullptr) continue;
      take(state_[k], whole.state[k], bytes_of(whole.state_format));
      inner_.state[k] = state_[k];
    }
  }

  SpanTail(const SpanTail&) = delete;  // the span points into it
  SpanTail& operator=(const SpanTail&) = delete;

  const UpdateSpan& span() { return inner_; }

  void write_back() const {
    give(param_, whole_.param, bytes_of(whole_.param_format));
    if (whole_.low != nullptr) give(low_, whole_.low, sizeof(*low_));
    if (whole_.copy != nullptr) give(copy_, whole_.copy, bytes_of(whole_.copy_format));
    for (std::size_t k = 0; k < kStates; ++k) {
      if (whole_.state[k] != nullptr)
        give(state_[k], whole_.state[k], bytes_of(whole_.state_format));
    }
  }

 private:
  static constexpr std::size_t kStates = 3;
  static constexpr std::size_t kLanes = hn::MaxLanes(hn::ScalableTag<float>());

  void take(void* to, const void* from, std::size_t bytes) const {
    std::memcpy(to, static_cast<const char*>(from) + begin_ * bytes, inner_.size * bytes);
  }
  void give(const void* from, void* to, std::size_t bytes) const {
    std::memcpy(static_cast<char*>(to) + begin_ * bytes, from, inner_.size * bytes);
  }

  const UpdateSpan& whole_;
  std::size_t begin_;
  UpdateSpan inner_;
  HWY_ALIGN float grad_[kLanes] = {};
  HWY_ALIGN float param_[kLanes] = {};
  HWY_ALIGN float copy_[kLanes] = {};
  HWY_ALIGN float state_[kStates][kLanes] = {};
  HWY_ALIGN std::uint16_t low_[kLanes] = {};
};

HWY_INLINE void prefetch_at(const void* array, Format format, std::size_t i) {
  if (array != nullptr) prefetch(static_cast<const char*>(array) + i * bytes_of(format));
}

// Prefetches the memory some distance after the elements from i on.
HWY_INLINE void prefetch(const UpdateSpan& span, std::size_t i) {
  prefetch_at(span.grad, span.grad_format, i);
  prefetch_at(span.param, span.param_format, i);
  prefetch_at(span.low, Format::bf16, i);
  prefetch_at(span.copy, span.copy_format, i);
  for (const void* state : span.state) prefetch_at(state, span.state_format, i);
}

// A span's formats, and which of its optional arrays it has.
struct SpanKind {
  Format grad;
  Format param;
  bool has_low;
  bool has_copy;
  Format copy;
  Format state = Format::fp32;
};

inline bool is_of(const SpanKind& kind, const UpdateSpan& span) {
  return span.state_format == kind.state && span.grad_format == kind.grad &&
         span.param_format == kind.param && (span.low != nullptr) == kind.has_low &&
         (span.copy != nullptr) == kind.has_copy &&
         (!kind.has_copy || span.copy_format == kind.copy);
}

// The same span. If its kind is known at compile time, so is that of the copy.
HWY_INLINE UpdateSpan specialized(const SpanKind& kind, const UpdateSpan& span) {
  UpdateSpan same = span;
  same.state_format = kind.state;
  same.grad_format = kind.grad;
  same.param_format = kind.param;
  same.copy_format = kind.copy;
  if (!kind.has_low) same.low = nullptr;
  if (!kind.has_copy) same.copy = nullptr;
  return same;
}

template <class D>
HWY_INLINE hn::Vec<D> load_grad(D d, const UpdateSpan& span, std::size_t i, float grad_scale) {
  return hn::Mul(load(span.grad_format, d, span.grad, i), hn::Set(d, grad_scale));
}

// The arrays that a loop over a span touches, besides parameters and state.
struct SpanUse {
  bool grad = true;
  bool copy = true;
};

// Calls visit(part, i) for all whole vectors of the span, and returns the end of the last one.
template <class Visit>
HWY_INLINE std::size_t visit_whole_vectors(const UpdateSpan part, const Visit& visit) {
  const std::size_t lanes = hn::Lanes(Float());
  std::size_t i = 0;
  for (; i + lanes <= part.size; i += lanes) {
    prefetch(part, i);
    visit(part, i, lanes);
  }
  return i;
}

// Calls visit(part, i, count) for every vector: the elements [i, i + count) of `part`, which is the
// span or, for the last few elements, a copy of them in which zeros follow.
//
// Processors prefetch by themselves, but not beyond a page of 4 KiB, and there are five arrays at a
// time. With explicit prefetches, and loops so short that many loads are in flight, fp32 SGD with
// momentum moves 51 GB/s instead of 31. The usual kinds of spans therefore have loops of their own;
// all combinations of formats would be too many. `visit` has to be inlined into each of these loops
// (SEMITONE_INLINE): a function looks up the formats for each vector, which makes steps on data in
// the caches take up to twice as long.
template <SpanUse kUse = SpanUse{}, class Visit>
HWY_INLINE void for_update_vectors(const UpdateSpan& whole, const Visit& visit) {
  constexpr SpanKind kFp32{Format::fp32, Format::fp32, false, false, Format::fp32};
  constexpr SpanKind kBf16Model{Format::bf16, Format::fp32, false, kUse.copy, Format::bf16};
  constexpr SpanKind kFp16Model{Format::fp16, Format::fp32, false, kUse.copy, Format::fp16};
  constexpr SpanKind kSplit{Format::bf16, Format::bf16, true, false, Format::bf16};
  constexpr SpanKind kSplitWithBf16State{Format::bf16, Format::bf16, true,
                                         false,        Format::bf16, Format::bf16};
  UpdateSpan span = whole;
  if (!kUse.grad) span.grad = nullptr;
  if (!kUse.copy) span.copy = nullptr;
  std::size_t i = 0;
  if (is_of(kFp32, span)) {
    i = visit_whole_vectors(specialized(kFp32, span), visit);
  } else if (is_of(kBf16Model, span)) {
    i = visit_whole_vectors(specialized(kBf16Model, span), visit);
  } else if (is_of(kFp16Model, span)) {
    i = visit_whole_vectors(specialized(kFp16Model, span), visit);
  } else if (is_of(kSplit, span)) {
    i = visit_whole_vectors(specialized(kSplit, span), visit);
  } else if (is_of(kSplitWithBf16State, span)) {
    i = visit_whole_vectors(specialized(kSplitWithBf16State, span), visit);
  } else {
    i = visit_whole_vectors(span, visit);
  }
  if (i == span.size) return;
  SpanTail tail(span, i);
  visit(tail.span(), 0, span.size - i);
  tail.write_back();
}

// new parameter = math(d, span, i, gradient, parameter) for every vector. math uses a rule's
// numbers as fp32, and itself loads and stores the state at element i. It is taken by value: the
// compiler then knows that no store changes its numbers.
template <class Math>
HWY_INLINE void update_elements(const UpdateSpan& span, const Math math) {
  const Float d;
  for_update_vectors(span, [&](const UpdateSpan& part, std::size_t i, std::size_t) SEMITONE_INLINE {
    const auto grad = load_grad(d, part, i, math.grad_scale);
    store_param(d, math(d, part, i, grad, load_param(d, part, i)), part, i);
  });
}

// a * b + c in two roundings.
template <class D>
HWY_INLINE hn::Vec<D> scaled_sum(D d, float a, hn::Vec<D> b, hn::Vec<D> c) {
  return hn::Add(hn::Mul(hn::Set(d, a), b), c);
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#endif  // include toggle
