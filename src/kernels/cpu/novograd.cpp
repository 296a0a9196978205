#include "src/kernels/updates.h"

#include <cstddef>

// Highway compiles this file once for each instruction set: the order of these lines matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/cpu/novograd.cpp"
#include <hwy/foreach_target.h>
#include "src/kernels/cpu/update-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {

struct NovoGradMath : BasicNovoGradRule<float> {
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V operator()(D d, const UpdateSpan& span, std::size_t i, V grad, V param) const {
    if (weight_decay != 0) grad = scaled_sum(d, weight_decay, param, grad);
    const auto m = flush_subnormal(
        d, scaled_sum(d, beta1, load_state(d, span, 0, i), hn::Mul(hn::Set(d, beta3), grad)));
    store_state(d, m, span, 0, i);
    auto update = hn::Mul(m, hn::Set(d, correction));
    if (decoupled_weight_decay != 0) update = scaled_sum(d, decoupled_weight_decay, param, update);
    return scaled_sum(d, -lr, update, param);
  }
};

void novograd_elements(const UpdateSpan& span, const NovoGradRule& rule) {
  update_elements(span, NovoGradMath{rule.as<float>()});
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace semitone::kernels {

HWY_EXPORT(novograd_elements);

void update(const UpdateSpan& span, const NovoGradRule& rule) {
  HWY_DYNAMIC_DISPATCH(novograd_elements)(span, rule);
}

}  // namespace semitone::kernels
#endif
