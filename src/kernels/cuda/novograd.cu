#include "src/kernels/cuda/update.cuh"

namespace semitone::kernels {
namespace {

struct NovoGradMath : BasicNovoGradRule<float> {
  __device__ float operator()(const UpdateSpan& span, std::size_t i, float grad,
                              float param) const {
    if (weight_decay != 0) grad = scaled_sum(weight_decay, param, grad);
    const float m = flush_subnormal(scaled_sum(beta1, load_state(span, 0, i), beta3 * grad));
    store_state(m, span, 0, i);
    float update = m * correction;
    if (decoupled_weight_decay != 0) update = scaled_sum(decoupled_weight_decay, param, update);
    return scaled_sum(-lr, update, param);
  }
};

}  // namespace

void update_cuda(const CudaStep<NovoGradRule>& step, CudaStream stream) {
  run_update<NovoGradMath>(step, stream);
}

}  // namespace semitone::kernels
