#include "src/train/run_recorder.h"

namespace semitone::train {
namespace {

constexpr std::int64_t kSteps = 10;

}  // namespace

void RunRecorder::on(const Resumed& resumed) {
  step_ = resumed.step;
  log_.set_step(step_ + 1);
  next_.on(resumed);
}

void RunRecorder::on(const StepDone& step) {
  step_ = step.step;
  // The first call of a training that does not resume; else it is this step already.
  log_.set_step(step_);
  if (step_ % kSteps == 0) {
    log_.add_scalar("train/loss", step.loss);
    log_.add_scalar("train/lr", step.lr);
    log_.add_scalar("train/images_per_second", step.images_per_second);
  }
  // Events of the next step come before its end.
  log_.set_step(step_ + 1);
  next_.on(step);
}

void RunRecorder::on(const NonFiniteStep& step) {
  next_.on(step);
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
  next_.on(tested);
}

}  // namespace semitone::train
