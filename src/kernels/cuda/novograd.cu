#include "src/kernels/cuda/update.cuh"

namespace semitone::kernels {
namespace {

struct NovoGradMath {
  __device__ explicit NovoGradMath(const NovoGradRule& rule)
      : decay(static_cast<float>(rule.decay)),
        beta1(static_cast<float>(rule.beta1)),
        averaged(static_cast<float>(rule.averaged)),
        correction(static_cast<float>(rule.correction)),
        late_decay(static_cast<float>(rule.late_decay)),
        minus_lr(static_cast<float>(-rule.lr)) {}

  static __device__ float grad_scale(const NovoGradRule& rule) {
    return static_cast<float>(rule.grad_scale);
  }

  __device__ float operator()(const UpdateSpan& span, std::size_t i, float grad,
                              float param) const {
    if (decay != 0) grad = scaled_sum(decay, param, grad);
    const float m = scaled_sum(beta1, load_state(span, 0, i), averaged * grad);
    store_state(m, span, 0, i);
    float update = m * correction;
    if (late_decay != 0) update = scaled_sum(late_decay, param, update);
    return scaled_sum(minus_lr, update, param);
  }

  float decay, beta1, averaged, correction, late_decay, minus_lr;
};

}  // namespace

void novograd_cuda(const CudaStep<NovoGradRule>& step, CudaStream stream) {
  update<NovoGradMath>(step, stream);
}

}  // namespace semitone::kernels
