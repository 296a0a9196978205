#pragma once

#include "src/kernels/kernels.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <tuple>

// Optimizer steps as plain C functions on pointers. A step reads a gradient, a parameter and its
// state, and writes the parameter and the state back, in one pass over memory. Arithmetic is fp32,
// with one rounding per operation in the order of the formulas below; a 16-bit result is rounded
// once. multi_tensor_update.h has the tensor-level functions.
//
// A new rule is a struct at the end of this file with overloads of update, update_cuda and
// ref::update, implemented in cpu/<rule>.cpp, cuda/<rule>.cu and ref/<rule>.cpp, and an element of
// AllRules. Callers and tests find it there.
namespace semitone::kernels {

// A contiguous part of one parameter: every pointer points to the same element.
struct UpdateSpan {
  const void* grad = nullptr;

  // The parameter. With `low` it is the upper half of a split fp32 master (rounding.h), a bf16.
  void* param = nullptr;
  std::uint16_t* low = nullptr;

  // Receives the new parameter, rounded; may be null.
  void* copy = nullptr;

  // The optimizer's state tensors; each rule says which. An unused one is null. For Adam and SGD
  // they may be bf16. The values that the next step reads are then rounded stochastically
  // (rounding.h), with the bits of hash_bits(number of the element ^ seed): state 0 uses the lower
  // half, state 1 the upper half. This step continues with the unrounded fp32 numbers.
  void* state[3] = {nullptr, nullptr, nullptr};
  std::uint32_t seed = 0;
  std::uint32_t first_element = 0;  // its number

  std::size_t size = 0;

  Format grad_format = Format::fp32;
  Format param_format = Format::fp32;
  Format copy_format = Format::bf16;
  Format state_format = Format::fp32;
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

// Flushes optimizer state: a number below the smallest normal one, 2^-126, becomes 0. Infinities
// and NaNs stay. Otherwise a moving average would never leave the subnormal numbers (0.9 times 4
// units is rounded to 4 units), and Intel's processors take some 150 cycles for each product with
// one.
constexpr std::uint32_t flush_subnormal(std::uint32_t bits) {
  return (bits & 0x7F800000) == 0 ? 0 : bits;
}

struct Update;           // multi_tensor_update.h
struct ComputedNumbers;  // there, too: the references below take them instead of the rule's own

// Rules: the numbers of one step for one parameter. The host computes them in fp64. The reference
// uses them directly for fp64 parameters; kernels round each to fp32 with as<float>(), which lists
// the members in their order. In each, g = grad * grad_scale. A value that a formula writes into
// the state (m, v, buf, h) becomes 0 if it is below the smallest normal number, 2^-126 (fp64:
// 2^-1022), and later formulas read that 0 (flush_subnormal).

// Adam and AdamW, in torch.optim's order of operations. State: m, v and, for amsgrad, the largest
// v, which in bf16 is rounded to nearest, since stochastic rounding would make a maximum grow
// further.
//
//   g += weight_decay * p;  p *= decay_factor
//   m = beta1 * m + (1 - beta1) * g
//   v = beta2 * v + (1 - beta2) * g * g
//   p += -step_size * m / (sqrt(v) / bias_correction2_sqrt + eps)
template <typename T>
struct BasicAdamRule {
  static constexpr std::string_view kName = "adam";
  static constexpr std::size_t kStates = 3;  // state tensors, at most
  static constexpr bool kTakesBf16State = true;

  T grad_scale = 1;
  T weight_decay = 0;  // L2: added to the gradient
  T decay_factor = 1;  // decoupled weight decay: 1 - lr * weight decay
  T beta1 = 0.9;
  T one_minus_beta1 = 1 - beta1;
  T beta2 = 0.999;
  T one_minus_beta2 = 1 - beta2;
  T eps = 1e-8;
  T step_size = 1e-3;           // lr / (1 - beta1^step)
  T bias_correction2_sqrt = 1;  // sqrt(1 - beta2^step)

  template <typename U>
  constexpr BasicAdamRule<U> as() const {
    return {
        U(grad_scale), U(weight_decay),    U(decay_factor), U(beta1),     U(one_minus_beta1),
        U(beta2),      U(one_minus_beta2), U(eps),          U(step_size), U(bias_correction2_sqrt)};
  }
};
using AdamRule = BasicAdamRule<double>;
void update(const UpdateSpan& span, const AdamRule& rule);
SEMITONE_CUDA_KERNEL(void update_cuda(const CudaStep<AdamRule>& step, CudaStream stream));
namespace ref {
void update(const Update& item, const AdamRule& rule);
}

// SGD. State: the momentum buffer, or none without momentum.
//
//   g += weight_decay * p;  g *= trust_ratio
//   buf = g the first time, else momentum * buf + one_minus_dampening * g
//   g = nesterov ? g + momentum * buf : buf
//   p += -lr * (g + decoupled_weight_decay * p)
template <typename T>
struct BasicSgdRule {
  static constexpr std::string_view kName = "sgd";
  static constexpr std::size_t kStates = 1;
  static constexpr bool kTakesBf16State = true;

  T grad_scale = 1;
  T weight_decay = 0;
  T trust_ratio = 1;  // LARC's, for the layer
  T momentum = 0;
  T one_minus_dampening = 1;
  T decoupled_weight_decay = 0;
  T lr = 1e-3;
  bool nesterov = false;
  bool first = false;

  template <typename U>
  constexpr BasicSgdRule<U> as() const {
    return {U(grad_scale),
            U(weight_decay),
            U(trust_ratio),
            U(momentum),
            U(one_minus_dampening),
            U(decoupled_weight_decay),
            U(lr),
            nesterov,
            first};
  }
};
using SgdRule = BasicSgdRule<double>;
void update(const UpdateSpan& span, const SgdRule& rule);
SEMITONE_CUDA_KERNEL(void update_cuda(const CudaStep<SgdRule>& step, CudaStream stream));
namespace ref {
void update(const Update& item, const SgdRule& rule);
void update(const Update& item, const SgdRule& rule, const ComputedNumbers& computed);
}  // namespace ref

// LAMB in two passes, between which the trust ratio is computed from the norms. State: m, v.
//
//   g += weight_decay * p
//   m = beta1 * m + beta3 * g
//   v = beta2 * v + (1 - beta2) * g * g
//   u = (m * inv_bias_correction1) / (sqrt(v * inv_bias_correction2) + eps)
//       + decoupled_weight_decay * p
//
// The first pass, lamb_moments, writes the moments and measures p and u. The second, update,
// computes u again from the moments and writes p += -step_size * u. Nothing else has to be stored,
// and gradients are not changed.
template <typename T>
struct BasicLambRule {
  static constexpr std::string_view kName = "lamb";
  static constexpr std::size_t kStates = 2;
  static constexpr bool kTakesBf16State = false;

  T grad_scale = 1;
  T weight_decay = 0;
  T decoupled_weight_decay = 0;
  T beta1 = 0.9;
  T beta3 = 0.1;  // Apex's name: 1 - beta1, or 1 without gradient averaging
  T beta2 = 0.999;
  T one_minus_beta2 = 1 - beta2;
  T eps = 1e-6;
  T inv_bias_correction1 = 1;  // 1 / (1 - beta1^step)
  T inv_bias_correction2 = 1;
  T step_size = 1e-3;  // lr * trust ratio: for the second pass

  template <typename U>
  constexpr BasicLambRule<U> as() const {
    return {U(grad_scale),
            U(weight_decay),
            U(decoupled_weight_decay),
            U(beta1),
            U(beta3),
            U(beta2),
            U(one_minus_beta2),
            U(eps),
            U(inv_bias_correction1),
            U(inv_bias_correction2),
            U(step_size)};
  }
};
using LambRule = BasicLambRule<double>;
struct LambSquares {
  double param = 0;
  double update = 0;
};
LambSquares lamb_moments(const UpdateSpan& span, const LambRule& rule);
void update(const UpdateSpan& span, const LambRule& rule);
// parts: memory for two numbers per block of all parameters. squares: for each parameter the sum of
// its squares and of its update's; zeros if found_inf is set.
SEMITONE_CUDA_KERNEL(void lamb_moments_cuda(const CudaStep<LambRule>& step, double* parts,
                                            double* squares, CudaStream stream));
SEMITONE_CUDA_KERNEL(void update_cuda(const CudaStep<LambRule>& step, CudaStream stream));
namespace ref {
void update(const Update& item, const LambRule& rule);
void update(const Update& item, const LambRule& rule, const ComputedNumbers& computed);
}  // namespace ref

// NovoGrad. Its second moment is one number per parameter, and is part of grad_scale or correction.
// State: m.
//
//   g += weight_decay * p
//   m = beta1 * m + beta3 * g
//   p += -lr * (m * correction + decoupled_weight_decay * p)
template <typename T>
struct BasicNovoGradRule {
  static constexpr std::string_view kName = "novograd";
  static constexpr std::size_t kStates = 1;
  static constexpr bool kTakesBf16State = false;

  T grad_scale = 1;
  T weight_decay = 0;
  T beta1 = 0.9;
  T beta3 = 0.1;
  T correction = 1;
  T decoupled_weight_decay = 0;
  T lr = 1e-3;

  template <typename U>
  constexpr BasicNovoGradRule<U> as() const {
    return {U(grad_scale), U(weight_decay),           U(beta1), U(beta3),
            U(correction), U(decoupled_weight_decay), U(lr)};
  }
};
using NovoGradRule = BasicNovoGradRule<double>;
void update(const UpdateSpan& span, const NovoGradRule& rule);
SEMITONE_CUDA_KERNEL(void update_cuda(const CudaStep<NovoGradRule>& step, CudaStream stream));
namespace ref {
void update(const Update& item, const NovoGradRule& rule);
void update(const Update& item, const NovoGradRule& rule, const ComputedNumbers& computed);
}  // namespace ref

// Adagrad. State: h.
//
//   g += weight_decay * p
//   h += g * g
//   p += -lr * (g / (sqrt(h) + eps) + decoupled_weight_decay * p)
template <typename T>
struct BasicAdagradRule {
  static constexpr std::string_view kName = "adagrad";
  static constexpr std::size_t kStates = 1;
  static constexpr bool kTakesBf16State = false;

  T grad_scale = 1;
  T weight_decay = 0;
  T decoupled_weight_decay = 0;
  T eps = 1e-10;
  T lr = 1e-2;

  template <typename U>
  constexpr BasicAdagradRule<U> as() const {
    return {U(grad_scale), U(weight_decay), U(decoupled_weight_decay), U(eps), U(lr)};
  }
};
using AdagradRule = BasicAdagradRule<double>;
void update(const UpdateSpan& span, const AdagradRule& rule);
SEMITONE_CUDA_KERNEL(void update_cuda(const CudaStep<AdagradRule>& step, CudaStream stream));
namespace ref {
void update(const Update& item, const AdagradRule& rule);
}

using AllRules = std::tuple<AdamRule, SgdRule, LambRule, NovoGradRule, AdagradRule>;

}  // namespace semitone::kernels
