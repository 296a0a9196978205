#pragma once

#include "semitone/core/events.h"
#include "src/report/sample_state.h"
#include "src/report/scale_numbers.h"

#include <functional>
#include <memory>
#include <mutex>

namespace semitone::report {

// Passes the events of the recorder's thread to the step that is looked at.
class SampleListener : public events::Listener {
 public:
  // Null: no step is looked at.
  void show(const std::shared_ptr<SampleState>& state);
  // The loss scales after the last step.
  KnownScales scales() const;

  // In a step that is looked at.
  bool wants_gradients() const override;

  using Listener::on;
  void on(const events::Cast& event) override;
  void on(const events::LossScaleUpdated& event) override;
  void on(const events::StepSkipped& event) override;
  void on(const events::OperatorReplaced& event) override;
  void on(const events::GradientsUnscaled& event) override;
  void on(const events::GradientsReady& event) override;
  void on(const events::PhaseBegan& event) override;
  void on(const events::PhaseEnded& event) override;

 private:
  // Calls use(state, time) for the step that is looked at, and keeps what it throws.
  void observe(const std::function<void(SampleState& state, double now)>& use);

  mutable std::mutex mutex_;
  std::shared_ptr<SampleState> state_;
  ScaleNumbers scale_numbers_;
  KnownScales scales_;
};

}  // namespace semitone::report
