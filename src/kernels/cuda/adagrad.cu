#include "src/kernels/cuda/update.cuh"

namespace semitone::kernels {
namespace {

struct AdagradMath : BasicAdagradRule<float> {
  static constexpr int kStateTensors = 1;
  static constexpr bool kReadsGrad = true;
  static constexpr bool kWritesStates = true;
  static constexpr bool kWritesParam = true;

  __device__ void operator()(float& param, float grad, float* state) const {
    if (weight_decay != 0) grad = scaled_sum(weight_decay, param, grad);
    const float h = flush_subnormal(state[0] + grad * grad);
    state[0] = h;
    float update = grad / (sqrtf(h) + eps);
    if (decoupled_weight_decay != 0) update = scaled_sum(decoupled_weight_decay, param, update);
    param = scaled_sum(-lr, update, param);
  }
};

}  // namespace

void update_cuda(const CudaStep<AdagradRule>& step, CudaStream stream) {
  run_update<AdagradMath>(UsualKinds{}, step, any_span, stream);
}

}  // namespace semitone::kernels
