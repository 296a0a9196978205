#include "src/train/run_recorder.h"

#include <fmt/format.h>

#include <cmath>

namespace semitone::train {
namespace {

constexpr std::int64_t kSteps = 10;

}  // namespace

void RunRecorder::on(const Resumed& resumed) {
  step_ = resumed.step;
  log_.set_step(step_ + 1);
  next_.on(resumed);
}

void RunRecorder::on(const TrainingBegins& begin) {
  kind_ = begin.kind;
  if (sample_every_ > 0) {
    recorder_.emplace(log_, begin.model, report::RecorderOptions().every(sample_every_));
    recorder_->add_optimizer(begin.optimizer);
  }
  next_.on(begin);
}

void RunRecorder::on(const TrainingEnds& end) {
  recorder_.reset();
  next_.on(end);
}

void RunRecorder::on(const StepBegins& begin) {
  log_.set_step(begin.step);
  next_.on(begin);
}

void RunRecorder::on(const StepDone& step) {
  step_ = step.step;
  if (step_ % kSteps == 0) {
    if (step_ != left_out_) log_.add_scalar("train/loss", step.loss);
    log_.add_scalar("train/lr", step.lr);
    log_.add_scalar(fmt::format("train/{}_per_second", kind_.items), step.items_per_second);
  }
  next_.on(step);
}

void RunRecorder::on(const NonFiniteStep& step) {
  next_.on(step);
}

void RunRecorder::on(const LossSpike& spike) {
  log_.add_scalar("train/loss_spike", spike.loss, spike.step);
  if (spike.action == OnSpike::skip) left_out_ = spike.step;
  next_.on(spike);
}

void RunRecorder::on(const RolledBack& rolled_back) {
  step_ = rolled_back.step;
  log_.add_scalar("train/rollback_to", static_cast<double>(rolled_back.saved), rolled_back.step);
  log_.add_text("train/rollback", rolled_back.reason, rolled_back.step);
  next_.on(rolled_back);
}

void RunRecorder::on(const EpochDone& epoch) {
  log_.add_scalar("train/epoch", static_cast<double>(epoch.epoch), step_);
  log_.add_scalar("train/epoch_loss", epoch.train_loss, step_);
  log_.add_scalar("train/epoch_seconds", epoch.seconds, step_);
  log_.add_scalar("amp/loss_scale", epoch.loss_scale, step_);
  log_.add_scalar("amp/skipped_steps", static_cast<double>(epoch.skipped_steps), step_);
  next_.on(epoch);
}

void RunRecorder::on(const Tested& tested) {
  log_.add_scalar("test/accuracy", tested.accuracy, step_);
  log_.add_scalar("test/loss", tested.loss, step_);
  if (kind_.has_perplexity) log_.add_scalar("test/perplexity", std::exp(tested.loss), step_);
  next_.on(tested);
}

}  // namespace semitone::train
