#include "src/kernels/cuda/update.cuh"

namespace semitone::kernels {
namespace {

struct SgdMath : SgdNumbers {
  using SgdNumbers::SgdNumbers;

  __device__ float operator()(const UpdateSpan& span, std::size_t i, float grad,
                              float param) const {
    if (decay != 0) grad = scaled_sum(decay, param, grad);
    if (local != 1) grad = grad * local;
    if (span.state[0] != nullptr) {
      float buffer = grad;
      if (!first) buffer = scaled_sum(momentum, load_state(span, 0, i), undamped * grad);
      buffer = flush_subnormal(buffer);
      store_moments<false>(span, i, buffer);
      grad = nesterov ? scaled_sum(momentum, buffer, grad) : buffer;
    }
    if (late_decay != 0) grad = scaled_sum(late_decay, param, grad);
    return scaled_sum(minus_lr, grad, param);
  }
};

}  // namespace

void sgd_cuda(const CudaStep<SgdRule>& step, CudaStream stream) {
  update<SgdMath>(step, stream);
}

}  // namespace semitone::kernels
