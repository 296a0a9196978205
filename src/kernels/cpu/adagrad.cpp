#include "src/kernels/updates.h"

#include <cstddef>

// Highway compiles this file once for each instruction set: the order of these lines matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/cpu/adagrad.cpp"
#include <hwy/foreach_target.h>
#include "src/kernels/cpu/update-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {

struct AdagradMath : BasicAdagradRule<float> {
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V operator()(D d, const UpdateSpan& span, std::size_t i, V grad, V param) const {
    if (weight_decay != 0) grad = scaled_sum(d, weight_decay, param, grad);
    const auto h = flush_subnormal(d, hn::Add(load_state(d, span, 0, i), hn::Mul(grad, grad)));
    store_state(d, h, span, 0, i);
    auto update = hn::Div(grad, hn::Add(hn::Sqrt(h), hn::Set(d, eps)));
    if (decoupled_weight_decay != 0) update = scaled_sum(d, decoupled_weight_decay, param, update);
    return scaled_sum(d, -lr, update, param);
  }
};

void adagrad_elements(const UpdateSpan& span, const AdagradRule& rule) {
  update_elements(span, AdagradMath{rule.as<float>()});
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace semitone::kernels {

HWY_EXPORT(adagrad_elements);

void update(const UpdateSpan& span, const AdagradRule& rule) {
  HWY_DYNAMIC_DISPATCH(adagrad_elements)(span, rule);
}

}  // namespace semitone::kernels
#endif
