#include "src/kernels/updates.h"

#include <cstddef>

// Highway compiles this file once for each instruction set: the order of these lines matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/cpu/adam.cpp"
#include <hwy/foreach_target.h>
#include "src/kernels/cpu/update-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {

struct AdamMath : BasicAdamRule<float> {
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V operator()(D d, const UpdateSpan& span, std::size_t i, V grad, V param) const {
    if (weight_decay != 0) grad = scaled_sum(d, weight_decay, param, grad);
    if (decay_factor != 1) param = hn::Mul(param, hn::Set(d, decay_factor));
    const auto m = flush_subnormal(d, scaled_sum(d, beta1, load_state(d, span, 0, i),
                                                 hn::Mul(hn::Set(d, one_minus_beta1), grad)));
    const auto square = hn::Mul(hn::Mul(hn::Set(d, one_minus_beta2), grad), grad);
    auto v = flush_subnormal(d, scaled_sum(d, beta2, load_state(d, span, 1, i), square));
    store_moments(d, span, i, m, &v);
    if (span.state[2] != nullptr) {
      const auto before = load_state(d, span, 2, i);
      v = flush_subnormal(d, hn::IfThenElse(hn::Or(hn::Gt(v, before), hn::IsNaN(v)), v, before));
      store_state(d, v, span, 2, i);
    }
    const auto denominator =
        hn::Add(hn::Div(hn::Sqrt(v), hn::Set(d, bias_correction2_sqrt)), hn::Set(d, eps));
    return hn::Add(param, hn::Div(hn::Mul(hn::Set(d, -step_size), m), denominator));
  }
};

void adam_elements(const UpdateSpan& span, const AdamRule& rule) {
  update_elements(span, AdamMath{rule.as<float>()});
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace semitone::kernels {

HWY_EXPORT(adam_elements);

void update(const UpdateSpan& span, const AdamRule& rule) {
  HWY_DYNAMIC_DISPATCH(adam_elements)(span, rule);
}

}  // namespace semitone::kernels
#endif
