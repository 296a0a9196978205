#include "src/kernels/cuda/update.cuh"

namespace semitone::kernels {
namespace {

struct SgdMath : BasicSgdRule<float> {
  __device__ float operator()(const UpdateSpan& span, std::size_t i, float grad,
                              float param) const {
    if (weight_decay != 0) grad = scaled_sum(weight_decay, param, grad);
    if (trust_ratio != 1) grad = grad * trust_ratio;
    if (span.state[0] != nullptr) {
      float buffer = grad;
      if (!first) buffer = scaled_sum(momentum, load_state(span, 0, i), one_minus_dampening * grad);
      buffer = flush_subnormal(buffer);
      store_moments<false>(span, i, buffer);
      grad = nesterov ? scaled_sum(momentum, buffer, grad) : buffer;
    }
    if (decoupled_weight_decay != 0) grad = scaled_sum(decoupled_weight_decay, param, grad);
    return scaled_sum(-lr, grad, param);
  }
};

}  // namespace

void update_cuda(const CudaStep<SgdRule>& step, CudaStream stream) {
  run_update<SgdMath>(step, stream);
}

}  // namespace semitone::kernels
