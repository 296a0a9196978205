#include "src/scaling/loss_scale_on_device.h"

#include "src/kernels/pinned.h"

#include <torch/types.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <tuple>

namespace semitone::amp {

LossScaleOnDevice::LossScaleOnDevice(const LossScaleOptions& options, c10::Device device)
    : options_(options) {
  const at::NoGradGuard no_grad;
  const auto on_device = at::TensorOptions(device);
  memory_ = at::empty({3}, on_device.dtype(at::kLong));
  now_ = {memory_.narrow(0, 0, 1).view(at::kDouble).select(0, 0), memory_.select(0, 1),
          memory_.select(0, 2)};
  scale_ = at::empty({}, on_device.dtype(at::kFloat));
  inverse_ = at::empty_like(scale_);
}

void LossScaleOnDevice::send(const detail::LossScaleState& state) {
  const at::NoGradGuard no_grad;
  const at::Tensor host = kernels::empty_for_copy({3}, at::kLong, memory_.device());
  auto* const numbers = host.mutable_data_ptr<std::int64_t>();
  numbers[0] = std::bit_cast<std::int64_t>(state.scale);
  numbers[1] = state.growth_tracker;
  numbers[2] = state.overflows;
  memory_.copy_(host, /*non_blocking=*/kernels::has_pinned_memory(memory_.device()));
  set_factors();
}

void LossScaleOnDevice::set_factors() {
  scale_.copy_(now_.scale);
  inverse_.copy_(now_.scale.reciprocal());
}

at::Tensor LossScaleOnDevice::rounded(const at::Tensor& scale) const {
  return options_.scale_dtype() == at::kFloat ? scale.to(at::kFloat).to(at::kDouble) : scale;
}

// One more overflow: back_off() in loss_scale_state.cpp.
LossScaleOnDevice::State LossScaleOnDevice::backed_off() const {
  const at::Tensor tracker = at::full_like(now_.growth_tracker, -options_.growth_delay());
  if (!options_.dynamic()) return {now_.scale, tracker, now_.overflows};
  const bool restart = options_.overflow_count() == OverflowCount::run_then_restart;
  const at::Tensor overflows = now_.overflows.add(1);
  const at::Tensor backs_off =
      restart ? overflows.eq(options_.hysteresis()) : overflows.ge(options_.hysteresis());
  const at::Tensor lower = rounded(now_.scale.mul(options_.backoff_factor()))
                               .clamp_min(options_.rounded(options_.min_scale()));
  return {at::where(backs_off, lower, now_.scale), tracker,
          restart ? overflows.masked_fill(backs_off, 0) : overflows};
}

// One more good step: grow() in loss_scale_state.cpp.
LossScaleOnDevice::State LossScaleOnDevice::grown() const {
  const at::Tensor tracker = now_.growth_tracker.add(1);
  if (!options_.dynamic()) return {now_.scale, tracker, now_.overflows};
  const bool keeps = options_.overflow_count() == OverflowCount::since_growth;
  const at::Tensor overflows = keeps ? now_.overflows : at::zeros_like(now_.overflows);
  if (options_.growth_interval() == 0) return {now_.scale, tracker, overflows};
  const at::Tensor grows = tracker.eq(options_.growth_interval());
  const at::Tensor product = rounded(now_.scale.mul(options_.growth_factor()));
  at::Tensor changes = grows;
  if (!std::isinf(options_.max_scale())) changes = changes.logical_and(product.isfinite());
  const at::Tensor higher = product.clamp_max(options_.rounded(options_.max_scale()));
  return {at::where(changes, higher, now_.scale), tracker.masked_fill(grows, 0),
          overflows.masked_fill(grows, 0)};
}

void LossScaleOnDevice::update(const at::Tensor& found_inf) {
  const at::NoGradGuard no_grad;
  const at::Tensor found = found_inf.reshape({}).ne(0);
  const State bad = backed_off();
  const State good = grown();
  now_.growth_tracker.copy_(at::where(found, bad.growth_tracker, good.growth_tracker));
  if (!options_.dynamic()) return;
  now_.scale.copy_(at::where(found, bad.scale, good.scale));
  now_.overflows.copy_(at::where(found, bad.overflows, good.overflows));
  set_factors();
}

detail::LossScaleState LossScaleOnDevice::read() const {
  const at::Tensor numbers = memory_.cpu();
  const auto* const first = numbers.const_data_ptr<std::int64_t>();
  return {std::bit_cast<double>(first[0]), first[1], first[2]};
}

bool same_rule(const LossScaleOptions& a, const LossScaleOptions& b) {
  const auto numbers = [](const LossScaleOptions& of) {
    return std::tuple(of.growth_factor(), of.backoff_factor(), of.growth_interval(),
                      of.growth_delay(), of.min_scale(), of.max_scale(), of.hysteresis(),
                      of.overflow_count(), of.dynamic(), of.scale_dtype());
  };
  return numbers(a) == numbers(b);
}

}  // namespace semitone::amp
