#include "src/kernels/cuda/update.cuh"

namespace semitone::kernels {
namespace {

struct AdamMath : AdamNumbers {
  using AdamNumbers::AdamNumbers;

  __device__ float operator()(const UpdateSpan& span, std::size_t i, float grad,
                              float param) const {
    if (decay != 0) grad = scaled_sum(decay, param, grad);
    if (keep != 1) param = param * keep;
    const float m = flush_subnormal(scaled_sum(beta1, load_state(span, 0, i), rest1 * grad));
    float v = flush_subnormal(scaled_sum(beta2, load_state(span, 1, i), rest2 * grad * grad));
    store_moments<true>(span, i, m, v);
    if (span.state[2] != nullptr) {
      const float before = load_state(span, 2, i);
      v = flush_subnormal(v > before || is_nan(v) ? v : before);
      store_state(v, span, 2, i);
    }
    return param + minus_step_size * m / (sqrtf(v) / root_correction + eps);
  }
};

}  // namespace

void adam_cuda(const CudaStep<AdamRule>& step, CudaStream stream) {
  update<AdamMath>(step, stream);
}

}  // namespace semitone::kernels
