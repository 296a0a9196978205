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
  // The update that follows from the moments.
  HWY_INLINE Vector update(Vector m, Vector v, Vector param) const {
    const Float d;
    const auto root = hn::Sqrt(hn::Mul(v, hn::Set(d, inv_bias_correction2)));
    const auto u =
        hn::Div(hn::Mul(m, hn::Set(d, inv_bias_correction1)), hn::Add(root, hn::Set(d, eps)));
    return decoupled_weight_decay != 0 ? scaled_sum(d, decoupled_weight_decay, param, u) : u;
  }
};

LambSquares lamb_moments(const UpdateSpan& span, const LambRule& rule) {
  const Float d;
  const LambMath math{rule.as<float>()};
  auto params = hn::Zero(hn::ScalableTag<double>());
  auto more_params = params;
  auto updates = params;
  auto more_updates = params;
  for_update_vectors<SpanUse{.copy = false}>(span, [&](const UpdateSpan& part, std::size_t i,
                                                       std::size_t count) SEMITONE_INLINE {
    const auto param = load_param(d, part, i);
    auto grad = load_grad(d, part, i, math.grad_scale);
    if (math.weight_decay != 0) grad = scaled_sum(d, math.weight_decay, param, grad);
    const auto m = flush_subnormal(d, scaled_sum(d, math.beta1, load_state(d, part, 0, i),
                                                 hn::Mul(hn::Set(d, math.beta3), grad)));
    const auto square = hn::Mul(hn::Mul(hn::Set(d, math.one_minus_beta2), grad), grad);
    const auto v = flush_subnormal(d, scaled_sum(d, math.beta2, load_state(d, part, 1, i), square));
    store_state(d, m, part, 0, i);
    store_state(d, v, part, 1, i);
    auto update = math.update(m, v, param);
    // Without an element, 0 / 0 if eps is 0.
    if (count < hn::Lanes(d)) update = hn::IfThenElseZero(hn::FirstN(d, count), update);
    add_squares(param, params, more_params);
    add_squares(update, updates, more_updates);
  });
  return {sum_of(params, more_params), sum_of(updates, more_updates)};
}

void lamb_elements(const UpdateSpan& span, const LambRule& rule) {
  const Float d;
  const LambMath math{rule.as<float>()};
  for_update_vectors<SpanUse{.grad = false}>(span, [&](const UpdateSpan& part, std::size_t i,
                                                       std::size_t) SEMITONE_INLINE {
    const auto param = load_param(d, part, i);
    const auto update = math.update(load_state(d, part, 0, i), load_state(d, part, 1, i), param);
    store_param(d, scaled_sum(d, -math.step_size, update, param), part, i);
  });
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
