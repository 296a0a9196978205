#pragma once

#include "semitone/report/recorder.h"
#include "semitone/report/run_log.h"
#include "src/train/observer.h"

#include <cstdint>
#include <optional>

namespace semitone::train {

// Records a training in a run log:
//
// - every 10 steps: train/loss (of this process's batch), train/lr, and train/images_per_second, or
//   what else DataKind::items says
// - at each spike of the loss: train/loss_spike (mean over all processes); at a rollback the text
//   train/rollback, and train/rollback_to, the step of the checkpoint
// - after each epoch: train/epoch, train/epoch_loss (mean), train/epoch_seconds, amp/loss_scale,
//   amp/skipped_steps
// - at the end: test/accuracy (0 to 1), test/loss; on a text test/perplexity
//
// - samples of the model and its training (report::Recorder)
//
// RunLog itself adds changes of the loss scale and skipped steps.
class RunRecorder : public Observer {
 public:
  // @param log           must outlive this object
  // @param next          receives the same events; must outlive this object
  // @param sample_every  steps between two samples; 0: no samples
  RunRecorder(report::RunLog& log, Observer& next, std::int64_t sample_every = 0)
      : log_(log), next_(next), sample_every_(sample_every) {}

  using Observer::on;
  void on(const Resumed& resumed) override;
  void on(const TrainingBegins& begin) override;
  void on(const TrainingEnds& end) override;
  void on(const StepBegins& begin) override;
  void on(const StepDone& step) override;
  void on(const NonFiniteStep& step) override;
  void on(const LossSpike& spike) override;
  void on(const RolledBack& rolled_back) override;
  void on(const EpochDone& epoch) override;
  void on(const Tested& tested) override;

 private:
  report::RunLog& log_;
  Observer& next_;
  std::int64_t sample_every_;
  std::optional<report::Recorder> recorder_;
  DataKind kind_ = kImages;
  std::int64_t step_ = 0;      // steps done
  std::int64_t left_out_ = 0;  // the last step whose batch was left out: its loss trains nothing
};

}  // namespace semitone::train
