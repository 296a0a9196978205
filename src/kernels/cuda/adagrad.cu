#include "src/kernels/cuda/update.cuh"

namespace semitone::kernels {
namespace {

struct AdagradMath : BasicAdagradRule<float> {
  __device__ float operator()(const UpdateSpan& span, std::size_t i, float grad,
                              float param) const {
    if (weight_decay != 0) grad = scaled_sum(weight_decay, param, grad);
    const float h = flush_subnormal(load_state(span, 0, i) + grad * grad);
    store_state(h, span, 0, i);
    float update = grad / (sqrtf(h) + eps);
    if (decoupled_weight_decay != 0) update = scaled_sum(decoupled_weight_decay, param, update);
    return scaled_sum(-lr, update, param);
  }
};

}  // namespace

void update_cuda(const CudaStep<AdagradRule>& step, CudaStream stream) {
  run_update<AdagradMath>(step, stream);
}

}  // namespace semitone::kernels
