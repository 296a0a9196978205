#include "src/kernels/cuda/update.cuh"

#include <functional>

namespace semitone::kernels {
namespace {

// With three states: amsgrad.
template <unsigned kUsed>
struct AdamMath : BasicAdamRule<float> {
  static constexpr unsigned kStateTensors = kUsed;
  static constexpr bool kReadsGrad = true;
  static constexpr bool kWritesStates = true;
  static constexpr bool kWritesParam = true;

  __device__ void operator()(float& param, float grad, float* state) const {
    if (weight_decay != 0) grad = scaled_sum(weight_decay, param, grad);
    if (decay_factor != 1) param = param * decay_factor;
    const float m = flush_subnormal(scaled_sum(beta1, state[0], one_minus_beta1 * grad));
    float v = flush_subnormal(scaled_sum(beta2, state[1], one_minus_beta2 * grad * grad));
    state[0] = m;
    state[1] = v;
    if constexpr (kUsed == 3) {
      const float before = state[2];
      v = flush_subnormal(v > before || is_nan(v) ? v : before);
      state[2] = v;
    }
    param = param + -step_size * m / (sqrtf(v) / bias_correction2_sqrt + eps);
  }
};

bool has_largest(const UpdateSpan& span) {
  return span.state[2] != nullptr;
}

}  // namespace

void update_cuda(const CudaStep<AdamRule>& step, CudaStream stream) {
  run_update<AdamMath<2>>(UsualKindsWithBf16State{}, step, std::not_fn(has_largest), stream);
  run_update<AdamMath<3>>(KindList<UsualSpans<Fp32, Fp32, Fp32>>{}, step, has_largest, stream);
}

}  // namespace semitone::kernels
