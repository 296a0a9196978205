#include "src/train/loss_watch.h"

#include "semitone/comm/group.h"
#include "semitone/core/events.h"
#include "src/train/on_spike.h"

#include <torch/types.h>

#include <cstddef>

namespace semitone::train {
namespace {

amp::DivergenceGuardOptions guard_options_of(const TrainOptions& options) {
  amp::DivergenceGuardOptions result = options.divergence_guard();
  // The loss scale counts skipped steps, and names the parameter. The caller rolls back.
  result.max_consecutive_skips(0).rollback({}).agree({});
  if (options.group().size() > 1) {
    result.agree([group = options.group()](at::Tensor& loss) {
      const events::PhaseScope phase(events::Phase::communication);
      group.all_reduce(loss, comm::ReduceOp::mean);
    });
  }
  return result;
}

}  // namespace

LossWatch::LossWatch(const TrainOptions& options, const torch::nn::Module& model,
                     amp::MixedPrecision& mixed, bool computes_in_fp8)
    : options_(options),
      mixed_(mixed),
      computes_in_fp8_(computes_in_fp8),
      guard_(guard_options_of(options)) {
  if (is_on() && options.on_spike() == OnSpike::skip) buffers_ = model.buffers();
}

bool LossWatch::is_on() const {
  return has_spike_limit(options_);
}

void LossWatch::before_forward() {
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    if (i == earlier_.size()) {
      earlier_.push_back(buffers_[i].clone());
    } else {
      earlier_[i].copy_(buffers_[i]);
    }
  }
}

bool LossWatch::leaves_out(const at::Tensor& loss, std::int64_t step, Observer& observer) {
  if (!is_on() || options_.on_spike() != OnSpike::skip) return false;
  guard_.set_step(step);
  if (guard_.inspect(loss) == amp::DivergenceGuard::Observed::normal) return false;
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < buffers_.size(); ++i) buffers_[i].copy_(earlier_[i]);
  if (computes_in_fp8_) mixed_.fp8_scaling().discard();
  report_spike(step, observer);
  return true;
}

void LossWatch::after_step(const at::Tensor& loss, amp::Step outcome, std::int64_t step,
                           Observer& observer) {
  if (!is_on() || options_.on_spike() == OnSpike::skip) return;
  guard_.set_step(step);
  if (guard_.observe(loss, outcome) != amp::DivergenceGuard::Observed::spike) return;
  if (options_.on_spike() == OnSpike::lower_scale) mixed_.back_off_loss_scale();
  report_spike(step, observer);
}

void LossWatch::report_spike(std::int64_t step, Observer& observer) {
  ++spikes_;
  observer.on(LossSpike{step, guard_.last_loss(), guard_.mean_loss(), options_.on_spike(),
                        mixed_.loss_scaler().scale()});
}

bool LossWatch::delays_checkpoints() const {
  return options_.on_spike() == OnSpike::rollback && guard_.consecutive_spikes() > 0;
}

}  // namespace semitone::train
