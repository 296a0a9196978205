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

  // The optimizer's state: which of them, says each rule. An unused one is null.
  float* state[3] = {nullptr, nullptr, nullptr};

  std::size_t size = 0;
};

// Rules: the numbers of one step for one parameter. The host computes them in fp64, and the
// definition takes them as they are for fp64 parameters; kernels round them to fp32. In each,
// g = grad * grad_scale.

// Adam and AdamW, in torch.optim's order of operations. State: m, v and, for amsgrad, the largest v.
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

}  // namespace semitone::kernels
