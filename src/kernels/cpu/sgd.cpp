#include "src/kernels/updates.h"

#include <cstddef>

// Highway compiles this file once for each instruction set: the order of these lines matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/cpu/sgd.cpp"
#include <hwy/foreach_target.h>
#include "src/kernels/cpu/update-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {

struct SgdMath : BasicSgdRule<float> {
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V operator()(D d, const UpdateSpan& span, std::size_t i, V grad, V param) const {
    if (weight_decay != 0) grad = scaled_sum(d, weight_decay, param, grad);
    if (trust_ratio != 1) grad = hn::Mul(grad, hn::Set(d, trust_ratio));
    if (span.state[0] != nullptr) {
      auto buffer = grad;
      if (!first) {
        buffer = scaled_sum(d, momentum, load_state(d, span, 0, i),
                            hn::Mul(hn::Set(d, one_minus_dampening), grad));
      }
      buffer = flush_subnormal(d, buffer);
      store_moments(d, span, i, buffer);
      grad = nesterov ? scaled_sum(d, momentum, buffer, grad) : buffer;
    }
    if (decoupled_weight_decay != 0) grad = scaled_sum(d, decoupled_weight_decay, param, grad);
    return scaled_sum(d, -lr, grad, param);
  }
};

void sgd_elements(const UpdateSpan& span, const SgdRule& rule) {
  update_elements(span, SgdMath{rule.as<float>()});
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace semitone::kernels {

HWY_EXPORT(sgd_elements);

void update(const UpdateSpan& span, const SgdRule& rule) {
  HWY_DYNAMIC_DISPATCH(sgd_elements)(span, rule);
}

}  // namespace semitone::kernels
#endif
