#pragma once

#include "src/kernels/updates.h"

#include <cstdint>

// The numbers of a rule as kernels use them, each rounded to fp32 once, and the treatment of state
// that is too small.
namespace semitone::kernels {

// Flushes optimizer state: a number below the smallest normal one, 2^-126, becomes 0. Infinities
// and NaNs stay. Otherwise a moving average would never leave the subnormal numbers (0.9 times 4
// units is rounded to 4 units), and Intel's processors take some 150 cycles for each product with
// one.
constexpr std::uint32_t flush_subnormal(std::uint32_t bits) {
  return (bits & 0x7F800000) == 0 ? 0 : bits;
}

constexpr float to_fp32(double number) {
  return static_cast<float>(number);
}

struct AdamNumbers {
  constexpr explicit AdamNumbers(const AdamRule& rule)
      : grad_scale(to_fp32(rule.grad_scale)),
        weight_decay(to_fp32(rule.weight_decay)),
        decay_factor(to_fp32(rule.decay_factor)),
        beta1(to_fp32(rule.beta1)),
        one_minus_beta1(to_fp32(1 - rule.beta1)),
        beta2(to_fp32(rule.beta2)),
        one_minus_beta2(to_fp32(1 - rule.beta2)),
        eps(to_fp32(rule.eps)),
        minus_step_size(to_fp32(-rule.step_size)),
        bias_correction2_sqrt(to_fp32(rule.bias_correction2_sqrt)) {}

  float grad_scale, weight_decay, decay_factor, beta1, one_minus_beta1, beta2, one_minus_beta2, eps,
      minus_step_size, bias_correction2_sqrt;
};

struct SgdNumbers {
  constexpr explicit SgdNumbers(const SgdRule& rule)
      : grad_scale(to_fp32(rule.grad_scale)),
        weight_decay(to_fp32(rule.weight_decay)),
        trust_ratio(to_fp32(rule.trust_ratio)),
        momentum(to_fp32(rule.momentum)),
        one_minus_dampening(to_fp32(rule.one_minus_dampening)),
        decoupled_weight_decay(to_fp32(rule.decoupled_weight_decay)),
        minus_lr(to_fp32(-rule.lr)),
        nesterov(rule.nesterov),
        first(rule.first) {}

  float grad_scale, weight_decay, trust_ratio, momentum, one_minus_dampening,
      decoupled_weight_decay, minus_lr;
  bool nesterov, first;
};

struct LambNumbers {
  constexpr explicit LambNumbers(const LambRule& rule)
      : grad_scale(to_fp32(rule.grad_scale)),
        weight_decay(to_fp32(rule.weight_decay)),
        decoupled_weight_decay(to_fp32(rule.decoupled_weight_decay)),
        beta1(to_fp32(rule.beta1)),
        beta3(to_fp32(rule.beta3)),
        beta2(to_fp32(rule.beta2)),
        one_minus_beta2(to_fp32(1 - rule.beta2)),
        eps(to_fp32(rule.eps)),
        inv_bias_correction1(to_fp32(rule.inv_bias_correction1)),
        inv_bias_correction2(to_fp32(rule.inv_bias_correction2)),
        minus_step_size(to_fp32(-rule.step_size)) {}

  float grad_scale, weight_decay, decoupled_weight_decay, beta1, beta3, beta2, one_minus_beta2, eps,
      inv_bias_correction1, inv_bias_correction2, minus_step_size;
};

struct NovoGradNumbers {
  constexpr explicit NovoGradNumbers(const NovoGradRule& rule)
      : grad_scale(to_fp32(rule.grad_scale)),
        weight_decay(to_fp32(rule.weight_decay)),
        beta1(to_fp32(rule.beta1)),
        beta3(to_fp32(rule.beta3)),
        correction(to_fp32(rule.correction)),
        decoupled_weight_decay(to_fp32(rule.decoupled_weight_decay)),
        minus_lr(to_fp32(-rule.lr)) {}

  float grad_scale, weight_decay, beta1, beta3, correction, decoupled_weight_decay, minus_lr;
};

struct AdagradNumbers {
  constexpr explicit AdagradNumbers(const AdagradRule& rule)
      : grad_scale(to_fp32(rule.grad_scale)),
        weight_decay(to_fp32(rule.weight_decay)),
        decoupled_weight_decay(to_fp32(rule.decoupled_weight_decay)),
        eps(to_fp32(rule.eps)),
        minus_lr(to_fp32(-rule.lr)) {}

  float grad_scale, weight_decay, decoupled_weight_decay, eps, minus_lr;
};

}  // namespace semitone::kernels
