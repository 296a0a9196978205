#pragma once

#include "src/kernels/kernels.h"

#include <cstddef>
#include <cstdint>
#include <span>

// Optimizer steps as plain C functions on pointers. A step reads a gradient, a parameter and its
// state, and writes the parameter and the state back, in one pass over memory. Arithmetic is fp32,
// with one rounding per operation in the order of the formulas below; a 16-bit result is rounded
// once. multi_tensor_update.h has the tensor-level functions, src/kernels/ref/ the reference
// implementations.
namespace semitone::kernels {

// A contiguous part of one parameter: every pointer points to the same element.
struct UpdateSpan {
  const void* grad = nullptr;
  Format grad_format = Format::fp32;

  // The parameter. With `low` it is the upper half of a split fp32 master (rounding.h), a bf16.
  void* param = nullptr;
  Format param_format = Format::fp32;
  std::uint16_t* low = nullptr;

  // Receives the new parameter, rounded; may be null.
  void* copy = nullptr;
  Format copy_format = Format::bf16;

  // The optimizer's state tensors; each rule says which. An unused one is null. For Adam and SGD
  // they may be bf16. The values that the next step reads are then rounded stochastically
  // (rounding.h), with the bits of hash_bits(number of the element ^ seed): state 0 uses the lower
  // half, state 1 the upper half. This step continues with the unrounded fp32 numbers.
  void* state[3] = {nullptr, nullptr, nullptr};
  Format state_format = Format::fp32;
  std::uint32_t seed = 0;
  std::uint32_t first_element = 0;  // its number

  std::size_t size = 0;
};

// A step of several parameters on a CUDA device. They must not share memory. With rules_on_device
// and found_inf, the step can be captured in a CUDA graph and repeated with other numbers.
template <typename Rule>
struct CudaStep {
  std::span<const UpdateSpan> spans;
  std::span<const Rule> rules;            // one for each span; empty if rules_on_device is given
  const Rule* rules_on_device = nullptr;  // one for each span, in the device's memory
  const float* found_inf = nullptr;       // in the device's memory: unless 0, nothing is written
};

// Rules: the numbers of one step for one parameter. The host computes them in fp64. The reference
// uses them directly for fp64 parameters; kernels round them to fp32. In each, g = grad *
// grad_scale. A value that a formula writes into the state (m, v, buf, h) becomes 0 if it is below
// the smallest normal number, 2^-126 (fp64: 2^-1022), and later formulas read that 0:
// flush_subnormal (rule_numbers.h).

// Adam and AdamW, in torch.optim's order of operations. State: m, v and, for amsgrad, the largest
// v, which in bf16 is rounded to nearest, since stochastic rounding would make a maximum grow
// further.
//
//   g += weight_decay * p;  p *= decay_factor
//   m = beta1 * m + (1 - beta1) * g
//   v = beta2 * v + (1 - beta2) * g * g
//   p += -step_size * m / (sqrt(v) / bias_correction2_sqrt + eps)
struct AdamRule {
  double grad_scale = 1;
  double weight_decay = 0;  // L2: added to the gradient
  double decay_factor = 1;  // decoupled weight decay: 1 - lr * weight decay
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double step_size = 1e-3;           // lr / (1 - beta1^step)
  double bias_correction2_sqrt = 1;  // sqrt(1 - beta2^step)
};
void adam(const UpdateSpan& span, const AdamRule& rule);
SEMITONE_CUDA_KERNEL(void adam_cuda(const CudaStep<AdamRule>& step, CudaStream stream));

// SGD. State: the momentum buffer, or none without momentum.
//
//   g += weight_decay * p;  g *= trust_ratio
//   buf = g the first time, else momentum * buf + one_minus_dampening * g
//   g = nesterov ? g + momentum * buf : buf
//   p += -lr * (g + decoupled_weight_decay * p)
struct SgdRule {
  double grad_scale = 1;
  double weight_decay = 0;
  double trust_ratio = 1;  // LARC's, for the layer
  double momentum = 0;
  double one_minus_dampening = 1;
  double decoupled_weight_decay = 0;
  double lr = 1e-3;
  bool nesterov = false;
  bool first = false;
};
void sgd(const UpdateSpan& span, const SgdRule& rule);
SEMITONE_CUDA_KERNEL(void sgd_cuda(const CudaStep<SgdRule>& step, CudaStream stream));

// LAMB in two passes, between which the host computes the trust ratio from the norms. State: m, v.
//
//   g += weight_decay * p
//   m = beta1 * m + beta3 * g
//   v = beta2 * v + (1 - beta2) * g * g
//   u = (m * inv_bias_correction1) / (sqrt(v * inv_bias_correction2) + eps)
//       + decoupled_weight_decay * p
//
// The first pass writes the moments and measures p and u. The second computes u again from the
// moments and writes p += -step_size * u. Nothing else has to be stored, and gradients are not
// changed.
struct LambRule {
  double grad_scale = 1;
  double weight_decay = 0;
  double decoupled_weight_decay = 0;
  double beta1 = 0.9;
  double beta3 = 0.1;  // Apex's name: 1 - beta1, or 1 without gradient averaging
  double beta2 = 0.999;
  double eps = 1e-6;
  double inv_bias_correction1 = 1;  // 1 / (1 - beta1^step)
  double inv_bias_correction2 = 1;
  double step_size = 1e-3;  // lr * trust ratio: for the second pass
};
struct LambSquares {
  double param = 0;
  double update = 0;
};
LambSquares lamb_moments(const UpdateSpan& span, const LambRule& rule);
void lamb_apply(const UpdateSpan& span, const LambRule& rule);
// parts: memory for two numbers per block of all parameters. squares: for each parameter the sum of
// its squares and of its update's; zeros if found_inf is set.
SEMITONE_CUDA_KERNEL(void lamb_moments_cuda(const CudaStep<LambRule>& step, double* parts,
                                            double* squares, CudaStream stream));
SEMITONE_CUDA_KERNEL(void lamb_apply_cuda(const CudaStep<LambRule>& step, CudaStream stream));

// NovoGrad. Its second moment is one number per parameter, and is part of grad_scale or correction.
// State: m.
//
//   g += weight_decay * p
//   m = beta1 * m + beta3 * g
//   p += -lr * (m * correction + decoupled_weight_decay * p)
struct NovoGradRule {
  double grad_scale = 1;
  double weight_decay = 0;
  double beta1 = 0.9;
  double beta3 = 0.1;
  double correction = 1;
  double decoupled_weight_decay = 0;
  double lr = 1e-3;
};
void novograd(const UpdateSpan& span, const NovoGradRule& rule);
SEMITONE_CUDA_KERNEL(void novograd_cuda(const CudaStep<NovoGradRule>& step, CudaStream stream));

// Adagrad. State: h.
//
//   g += weight_decay * p
//   h += g * g
//   p += -lr * (g / (sqrt(h) + eps) + decoupled_weight_decay * p)
struct AdagradRule {
  double grad_scale = 1;
  double weight_decay = 0;
  double decoupled_weight_decay = 0;
  double eps = 1e-10;
  double lr = 1e-2;
};
void adagrad(const UpdateSpan& span, const AdagradRule& rule);
SEMITONE_CUDA_KERNEL(void adagrad_cuda(const CudaStep<AdagradRule>& step, CudaStream stream));

}  // namespace semitone::kernels
