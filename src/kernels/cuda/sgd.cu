#include "src/kernels/cuda/update.cuh"

#include <functional>

namespace semitone::kernels {
namespace {

// With a momentum buffer or without. The first step reads what the buffer has, and ignores it.
template <unsigned kUsed>
struct SgdMath : BasicSgdRule<float> {
  static constexpr unsigned kStateTensors = kUsed;
  static constexpr bool kReadsGrad = true;
  static constexpr bool kWritesStates = true;
  static constexpr bool kWritesParam = true;

  __device__ void operator()(float& param, float grad, float* state) const {
    if (weight_decay != 0) grad = scaled_sum(weight_decay, param, grad);
    if (trust_ratio != 1) grad = grad * trust_ratio;
    if constexpr (kUsed == 1) {
      float buffer = grad;
      if (!first) buffer = scaled_sum(momentum, state[0], one_minus_dampening * grad);
      buffer = flush_subnormal(buffer);
      state[0] = buffer;
      grad = nesterov ? scaled_sum(momentum, buffer, grad) : buffer;
    }
    if (decoupled_weight_decay != 0) grad = scaled_sum(decoupled_weight_decay, param, grad);
    param = scaled_sum(-lr, grad, param);
  }
};

bool has_momentum(const UpdateSpan& span) {
  return span.state[0] != nullptr;
}

}  // namespace

void update_cuda(const CudaStep<SgdRule>& step, CudaStream stream) {
  run_update<SgdMath<1>>(UsualKindsWithBf16State{}, step, has_momentum, stream);
  run_update<SgdMath<0>>(UsualKinds{}, step, std::not_fn(has_momentum), stream);
}

}  // namespace semitone::kernels
