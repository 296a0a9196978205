#include "src/kernels/cuda/update.cuh"

namespace semitone::kernels {
namespace {

struct NovoGradMath : BasicNovoGradRule<float> {
  static constexpr int kStateTensors = 1;
  static constexpr bool kReadsGrad = true;
  static constexpr bool kWritesStates = true;
  static constexpr bool kWritesParam = true;

  __device__ void operator()(float& param, float grad, float* state) const {
    if (weight_decay != 0) grad = scaled_sum(weight_decay, param, grad);
    const float m = flush_subnormal(scaled_sum(beta1, state[0], beta3 * grad));
    state[0] = m;
    float update = m * correction;
    if (decoupled_weight_decay != 0) update = scaled_sum(decoupled_weight_decay, param, update);
    param = scaled_sum(-lr, update, param);
  }
};

}  // namespace

void update_cuda(const CudaStep<NovoGradRule>& step, CudaStream stream) {
  run_update<NovoGradMath>(UsualKinds{}, step, any_span, stream);
}

}  // namespace semitone::kernels
