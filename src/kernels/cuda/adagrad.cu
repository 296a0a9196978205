#include "src/kernels/cuda/update.cuh"

namespace semitone::kernels {
namespace {

struct AdagradMath {
  __device__ explicit AdagradMath(const AdagradRule& rule)
      : decay(static_cast<float>(rule.decay)),
        late_decay(static_cast<float>(rule.late_decay)),
        eps(static_cast<float>(rule.eps)),
        minus_lr(static_cast<float>(-rule.lr)) {}

  static __device__ float grad_scale(const AdagradRule& rule) {
    return static_cast<float>(rule.grad_scale);
  }

  __device__ float operator()(const UpdateSpan& span, std::size_t i, float grad,
                              float param) const {
    if (decay != 0) grad = scaled_sum(decay, param, grad);
    const float h = load_state(span, 0, i) + grad * grad;
    store_state(h, span, 0, i);
    float update = grad / (sqrtf(h) + eps);
    if (late_decay != 0) update = scaled_sum(late_decay, param, update);
    return scaled_sum(minus_lr, update, param);
  }

  float decay, late_decay, eps, minus_lr;
};

}  // namespace

void adagrad_cuda(const CudaStep<AdagradRule>& step, CudaStream stream) {
  update<AdagradMath>(step, stream);
}

}  // namespace semitone::kernels
