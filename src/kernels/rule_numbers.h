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
        decay(to_fp32(rule.decay)),
        keep(to_fp32(rule.keep)),
        beta1(to_fp32(rule.beta1)),
        rest1(to_fp32(1 - rule.beta1)),
        beta2(to_fp32(rule.beta2)),
        rest2(to_fp32(1 - rule.beta2)),
        eps(to_fp32(rule.eps)),
        minus_step_size(to_fp32(-rule.step_size)),
        root_correction(to_fp32(rule.root_correction)) {}

  float grad_scale, decay, keep, beta1, rest1, beta2, rest2, eps, minus_step_size, root_correction;
};

struct SgdNumbers {
  constexpr explicit SgdNumbers(const SgdRule& rule)
      : grad_scale(to_fp32(rule.grad_scale)),
        decay(to_fp32(rule.decay)),
        local(to_fp32(rule.local)),
        momentum(to_fp32(rule.momentum)),
        undamped(to_fp32(rule.undamped)),
        late_decay(to_fp32(rule.late_decay)),
        minus_lr(to_fp32(-rule.lr)),
        nesterov(rule.nesterov),
        first(rule.first) {}

  float grad_scale, decay, local, momentum, undamped, late_decay, minus_lr;
  bool nesterov, first;
};

struct LambNumbers {
  constexpr explicit LambNumbers(const LambRule& rule)
      : grad_scale(to_fp32(rule.grad_scale)),
        decay(to_fp32(rule.decay)),
        late_decay(to_fp32(rule.late_decay)),
        beta1(to_fp32(rule.beta1)),
        averaged(to_fp32(rule.averaged)),
        beta2(to_fp32(rule.beta2)),
        rest2(to_fp32(1 - rule.beta2)),
        eps(to_fp32(rule.eps)),
        correction1(to_fp32(rule.correction1)),
        correction2(to_fp32(rule.correction2)),
        minus_step_size(to_fp32(-rule.step_size)) {}

  float grad_scale, decay, late_decay, beta1, averaged, beta2, rest2, eps, correction1, correction2,
      minus_step_size;
};

struct NovoGradNumbers {
  constexpr explicit NovoGradNumbers(const NovoGradRule& rule)
      : grad_scale(to_fp32(rule.grad_scale)),
        decay(to_fp32(rule.decay)),
        beta1(to_fp32(rule.beta1)),
        averaged(to_fp32(rule.averaged)),
        correction(to_fp32(rule.correction)),
        late_decay(to_fp32(rule.late_decay)),
        minus_lr(to_fp32(-rule.lr)) {}

  float grad_scale, decay, beta1, averaged, correction, late_decay, minus_lr;
};

struct AdagradNumbers {
  constexpr explicit AdagradNumbers(const AdagradRule& rule)
      : grad_scale(to_fp32(rule.grad_scale)),
        decay(to_fp32(rule.decay)),
        late_decay(to_fp32(rule.late_decay)),
        eps(to_fp32(rule.eps)),
        minus_lr(to_fp32(-rule.lr)) {}

  float grad_scale, decay, late_decay, eps, minus_lr;
};

}  // namespace semitone::kernels
