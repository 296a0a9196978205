#pragma once

// Internal interface: other rooms include this header.

#include "semitone/scaling/detail/loss_scale_state.h"
#include "semitone/scaling/loss_scale.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace semitone::amp {

// A dynamic loss scale in a device's memory, by the rule of detail::next_loss_scale, bit for bit.
// All but send() can be captured in a CUDA graph. Nothing is read back: the host applies the same
// rule when it learns found_inf.
class LossScaleOnDevice {
 public:
  LossScaleOnDevice(const LossScaleOptions& options, c10::Device device);

  // Replaces scale and counters. The host does not wait.
  void send(const detail::LossScaleState& state);
  // Ends a step. found_inf: one element on the device, 0 if all gradients were finite.
  void update(const at::Tensor& found_inf);

  // The factors for losses and for gradients, of one fp32 element each, as LossScaler gives them to
  // the host: the same tensors before and after send() and update().
  const at::Tensor& scale() const { return scale_; }
  const at::Tensor& inverse() const { return inverse_; }

  // The rule, as it was given.
  const LossScaleOptions& options() const { return options_; }
  // Scale and counters, read from the device.
  detail::LossScaleState read() const;

 private:
  // Scale in fp64, and counters: elements without dimensions.
  struct State {
    at::Tensor scale;
    at::Tensor growth_tracker;
    at::Tensor overflows;
  };
  State backed_off() const;
  State grown() const;
  at::Tensor rounded(const at::Tensor& scale) const;
  void set_factors();

  LossScaleOptions options_;
  at::Tensor memory_;  // of now_: three int64, of which the first has the bits of the scale
  State now_;
  at::Tensor scale_;
  at::Tensor inverse_;
};

// Whether two rules are the same.
bool same_rule(const LossScaleOptions& a, const LossScaleOptions& b);

}  // namespace semitone::amp
