#include "src/kernels/updates.h"

#include <cstddef>

// Highway compiles this file once for each instruction set: the order of these lines matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/cpu/lamb.cpp"
#include <hwy/foreach_target.h>
#include "src/kernels/cpu/update-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {

struct LambMath : BasicLambRule<float> {
  // Updates the moments at element i of a span.
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE void move(D d, const UpdateSpan& span, std::size_t i, V grad, V param) const {
    if (weight_decay != 0) grad = scaled_sum(d, weight_decay, param, grad);
    const auto m =
        scaled_sum(d, beta1, load_state(d, span, 0, i), hn::Mul(hn::Set(d, beta3), grad));
    const auto square = hn::Mul(hn::Mul(hn::Set(d, one_minus_beta2), grad), grad);
    const auto v = scaled_sum(d, beta2, load_state(d, span, 1, i), square);
    store_state(d, flush_subnormal(d, m), span, 0, i);
    store_state(d, flush_subnormal(d, v), span, 1, i);
  }

  // The update that follows from the moments.
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V update(D d, const UpdateSpan& span, std::size_t i, V param) const {
    const auto m = hn::Mul(load_state(d, span, 0, i), hn::Set(d, inv_bias_correction1));
    const auto v = hn::Mul(load_state(d, span, 1, i), hn::Set(d, inv_bias_correction2));
    const auto u = hn::Div(m, hn::Add(hn::Sqrt(v), hn::Set(d, eps)));
    return decoupled_weight_decay != 0 ? scaled_sum(d, decoupled_weight_decay, param, u) : u;
  }

  // The second pass, in the form that update_elements needs.
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V operator()(D d, const UpdateSpan& span, std::size_t i, V /*grad*/, V param) const {
    return scaled_sum(d, -step_size, update(d, span, i, param), param);
  }
};

// The sum of the squares of a vector's first `count` lanes, lane by lane in fp64.
template <class D, class Wide>
HWY_INLINE void add_squares(D d, hn::Vec<D> v, std::size_t count, Wide wide, hn::Vec<Wide>& sum) {
  const hn::Rebind<float, Wide> narrow;
  HWY_ALIGN float lanes[hn::MaxLanes(D())];
  hn::Store(hn::IfThenElseZero(hn::FirstN(d, count), v), d, lanes);
  for (std::size_t i = 0; i < hn::Lanes(d); i += hn::Lanes(wide)) {
    const auto x = hn::PromoteTo(wide, hn::Load(narrow, lanes + i));
    sum = hn::Add(sum, hn::Mul(x, x));
  }
}

LambSquares lamb_moments(const UpdateSpan& span, const LambRule& rule) {
  const hn::ScalableTag<float> d;
  const hn::ScalableTag<double> wide;
  const std::size_t lanes = hn::Lanes(d);
  const LambMath math{rule.as<float>()};
  auto params = hn::Zero(wide);
  auto updates = hn::Zero(wide);
  const auto at = [&](const UpdateSpan& part, std::size_t i, std::size_t count) HWY_ATTR {
    const auto grad = hn::Mul(load(part.grad_format, d, part.grad, i), hn::Set(d, math.grad_scale));
    const auto param = load_param(d, part, i);
    math.move(d, part, i, grad, param);
    add_squares(d, param, count, wide, params);
    add_squares(d, math.update(d, part, i, param), count, wide, updates);
  };
  std::size_t i = 0;
  for (; i + lanes <= span.size; i += lanes) at(span, i, lanes);
  if (i < span.size) {
    SpanTail tail(span, i);
    at(tail.span(), 0, span.size - i);
    tail.write_back();
  }
  return {hn::GetLane(hn::SumOfLanes(wide, params)), hn::GetLane(hn::SumOfLanes(wide, updates))};
}

void lamb_elements(const UpdateSpan& span, const LambRule& rule) {
  update_elements(span, LambMath{rule.as<float>()});
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace semitone::kernels {

HWY_EXPORT(lamb_moments);
HWY_EXPORT(lamb_elements);

LambSquares lamb_moments(const UpdateSpan& span, const LambRule& rule) {
  return HWY_DYNAMIC_DISPATCH(lamb_moments)(span, rule);
}

void update(const UpdateSpan& span, const LambRule& rule) {
  HWY_DYNAMIC_DISPATCH(lamb_elements)(span, rule);
}

}  // namespace semitone::kernels
#endif
