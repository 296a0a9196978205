#include "src/kernels/cuda/update.cuh"

namespace semitone::kernels {
namespace {

struct SgdMath {
  __device__ explicit SgdMath(const SgdRule& rule)
      : decay(static_cast<float>(rule.decay)),
        local(static_cast<float>(rule.local)),
        momentum(static_cast<float>(rule.momentum)),
        undamped(static_cast<float>(rule.undamped)),
        late_decay(static_cast<float>(rule.late_decay)),
        minus_lr(static_cast<float>(-rule.lr)),
        nesterov(rule.nesterov),
        first(rule.first) {}

  static __device__ float grad_scale(const SgdRule& rule) {
    return static_cast<float>(rule.grad_scale);
  }

  __device__ float operator()(const UpdateSpan& span, std::size_t i, float grad,
                              float param) const {
    if (decay != 0) grad = scaled_sum(decay, param, grad);
    if (local != 1) grad = grad * local;
    if (span.state[0] != nullptr) {
      float buffer = grad;
      if (!first) buffer = scaled_sum(momentum, load_state(span, 0, i), undamped * grad);
      store_moments<false>(span, i, buffer);
      grad = nesterov ? scaled_sum(momentum, buffer, grad) : buffer;
    }
    if (late_decay != 0) grad = scaled_sum(late_decay, param, grad);
    return scaled_sum(minus_lr, grad, param);
  }

  float decay, local, momentum, undamped, late_decay, minus_lr;
  bool nesterov, first;
};

}  // namespace

void sgd_cuda(const CudaStep<SgdRule>& step, CudaStream stream) {
  update<SgdMath>(step, stream);
}

}  // namespace semitone::kernels
