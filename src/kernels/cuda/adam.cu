#include "src/kernels/cuda/update.cuh"

namespace semitone::kernels {
namespace {

struct AdamMath : BasicAdamRule<float> {
  __device__ float operator()(const UpdateSpan& span, std::size_t i, float grad,
                              float param) const {
    if (weight_decay != 0) grad = scaled_sum(weight_decay, param, grad);
    if (decay_factor != 1) param = param * decay_factor;
    const float m =
        flush_subnormal(scaled_sum(beta1, load_state(span, 0, i), one_minus_beta1 * grad));
    float v =
        flush_subnormal(scaled_sum(beta2, load_state(span, 1, i), one_minus_beta2 * grad * grad));
    store_moments<true>(span, i, m, v);
    if (span.state[2] != nullptr) {
      const float before = load_state(span, 2, i);
      v = flush_subnormal(v > before || is_nan(v) ? v : before);
      store_state(v, span, 2, i);
    }
    return param + -step_size * m / (sqrtf(v) / bias_correction2_sqrt + eps);
  }
};

}  // namespace

void update_cuda(const CudaStep<AdamRule>& step, CudaStream stream) {
  run_update<AdamMath>(step, stream);
}

}  // namespace semitone::kernels
