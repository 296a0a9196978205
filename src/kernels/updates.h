#pragma once

#include "src/kernels/kernels.h"

#include <cstddef>
#include <cstdint>

// Optimizer steps as plain C functions on pointers. A step reads a gradient, a parameter and its
// state, and writes the parameter and the state back, all in one pass over memory. Arithmetic is
// fp32, one rounding per operation in the order of the formulas below; a 16-bit result is rounded
// once. multi_tensor_update.h has the tensor-level functions, src/kernels/ref/ the definitions.
namespace semitone::kernels {

// A stretch of one parameter: every pointer stands at the same element.
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

  // The optimizer's state: which of them, says each rule. An unused one is null. Adam and SGD take
  // bf16 too. What is read again in the next step is then rounded stochastically (rounding.h): of
  // hash_bits(number of the element ^ seed), state 0 takes the lower half and state 1 the upper
  // one; this step goes on with the number in fp32.
  void* state[3] = {nullptr, nullptr, nullptr};
  Format state_format = Format::fp32;
  std::uint32_t seed = 0;
  std::uint32_t first_element = 0;  // its number

  std::size_t size = 0;
};

// Rules: the numbers of one step for one parameter. The host computes them in fp64, and the
// definition takes them as they are for fp64 parameters; kernels round them to fp32. In each,
// g = grad * grad_scale. What a formula writes into the state (m, v, buf, h) becomes 0 where it is
// below the smallest normal number, 2^-126 (fp64: 2^-1022), and the formulas below it read that 0:
// flush_subnormal (rule_numbers.h).

// Adam and AdamW, in torch.optim's order of operations. State: m, v and, for amsgrad, the largest
// v, which in bf16 is rounded to nearest: rounding the largest up and down too would make it grow
// further.
//
//   g += decay * p;  p *= keep
//   m = beta1 * m + (1 - beta1) * g
//   v = beta2 * v + (1 - beta2) * g * g
//   p += -step_size * m / (sqrt(v) / root_correction + eps)
struct AdamRule {
  double grad_scale = 1;
  double decay = 0;  // L2: weight decay
  double keep = 1;   // decoupled: 1 - lr * weight decay
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double step_size = 1e-3;     // lr / (1 - beta1^step)
  double root_correction = 1;  // sqrt(1 - beta2^step)
};
void adam(const UpdateSpan& span, const AdamRule& rule);

// SGD. State: the momentum buffer, or none without momentum.
//
//   g += decay * p;  g *= local
//   buf = g the first time, else momentum * buf + undamped * g
//   g = nesterov ? g + momentum * buf : buf
//   p += -lr * (g + late_decay * p)
struct SgdRule {
  double grad_scale = 1;
  double decay = 0;
  double local = 1;  // the layer-wise factor of LARC
  double momentum = 0;
  double undamped = 1;  // 1 - dampening
  double late_decay = 0;
  double lr = 1e-3;
  bool nesterov = false;
  bool first = false;
};
void sgd(const UpdateSpan& span, const SgdRule& rule);

// LAMB in two passes, between which the host takes the trust ratio from the norms. State: m, v.
//
//   g += decay * p
//   m = beta1 * m + averaged * g
//   v = beta2 * v + (1 - beta2) * g * g
//   u = (m * correction1) / (sqrt(v * correction2) + eps) + late_decay * p
//
// The first pass writes the moments and measures p and u; the second computes u again from the
// moments (nothing else has to be stored, and gradients stay) and writes p += -step_size * u.
struct LambRule {
  double grad_scale = 1;
  double decay = 0;
  double late_decay = 0;
  double beta1 = 0.9;
  double averaged = 0.1;  // 1 - beta1, or 1
  double beta2 = 0.999;
  double eps = 1e-6;
  double correction1 = 1;  // 1 / (1 - beta1^step)
  double correction2 = 1;
  double step_size = 1e-3;  // lr * trust ratio: for the second pass
};
struct LambSquares {
  double param = 0;
  double update = 0;
};
LambSquares lamb_moments(const UpdateSpan& span, const LambRule& rule);
void lamb_apply(const UpdateSpan& span, const LambRule& rule);

// NovoGrad, whose second moment is one number for each parameter and part of grad_scale or
// correction. State: m.
//
//   g += decay * p
//   m = beta1 * m + averaged * g
//   p += -lr * (m * correction + late_decay * p)
struct NovoGradRule {
  double grad_scale = 1;
  double decay = 0;
  double beta1 = 0.9;
  double averaged = 0.1;
  double correction = 1;
  double late_decay = 0;
  double lr = 1e-3;
};
void novograd(const UpdateSpan& span, const NovoGradRule& rule);

// Adagrad. State: h.
//
//   g += decay * p
//   h += g * g
//   p += -lr * (g / (sqrt(h) + eps) + late_decay * p)
struct AdagradRule {
  double grad_scale = 1;
  double decay = 0;
  double late_decay = 0;
  double eps = 1e-10;
  double lr = 1e-2;
};
void adagrad(const UpdateSpan& span, const AdagradRule& rule);

}  // namespace semitone::kernels
