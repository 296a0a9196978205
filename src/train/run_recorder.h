#pragma once

#include "semitone/report/run_log.h"
#include "src/train/observer.h"

#include <cstdint>

namespace semitone::train {

// Records a training in a run log:
//
// - every 10 steps: train/loss (of this process's batch), train/lr, train/images_per_second
// - after each epoch: train/epoch, train/epoch_loss (mean), train/epoch_seconds, amp/loss_scale,
//   amp/skipped_steps
// - at the end: test/accuracy (0 to 1), test/loss
//
// RunLog itself adds changes of the loss scale and skipped steps.
class RunRecorder : public Observer {
 public:
  // @param log   must outlive this object
  // @param next  receives the same events; must outlive this object
  RunRecorder(report::RunLog& log, Observer& next) : log_(log), next_(next) {}

  using Observer::on;
  void on(const Resumed& resumed) override;
  void on(const StepDone& step) override;
  void on(const NonFiniteStep& step) override;
  void on(const EpochDone& epoch) override;
  void on(const Tested& tested) override;

 private:
  report::RunLog& log_;
  Observer& next_;
  std::int64_t step_ = 0;  // steps done
};

}  // namespace semitone::train
