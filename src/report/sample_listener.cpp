#include "src/report/sample_listener.h"

#include "src/report/observation.h"
#include "src/report/operator_trace.h"
#include "src/report/tensor_values.h"

#include <exception>

namespace semitone::report {

void SampleListener::show(const std::shared_ptr<SampleState>& state) {
  const std::lock_guard lock(mutex_);
  state_ = state;
}

KnownScales SampleListener::scales() const {
  const std::lock_guard lock(mutex_);
  return scales_;
}

bool SampleListener::wants_gradients() const {
  const std::lock_guard lock(mutex_);
  return state_ != nullptr && state_->is_looking();
}

void SampleListener::observe(const std::function<void(SampleState& state, double now)>& use) {
  const auto state = [&] {
    const std::lock_guard lock(mutex_);
    return state_;
  }();
  if (state == nullptr || !state->is_looking()) return;
  const Observation observation(state->observed());
  try {
    const QuietScope quiet;
    use(*state, observation.step_time());
  } catch (const std::exception& error) {
    state->fail(error.what());
  }
}

void SampleListener::on(const events::Cast& event) {
  observe([&](SampleState& state, double) { OperatorTrace::add(state, event); });
}

void SampleListener::on(const events::OperatorReplaced& event) {
  observe([&](SampleState& state, double) { OperatorTrace::add(state, event); });
}

void SampleListener::on(const events::LossScaleUpdated& given) {
  events::LossScaleUpdated event = given;
  {
    const std::lock_guard lock(mutex_);
    event.loss_id = scale_numbers_.number_of(given).value;
    if (event.loss_id == 0) scales_.scale = event.after;
    if (event.loss_id != 0) scales_.has_other_losses = true;
  }
  observe([&](SampleState& state, double) { state.add(event); });
}

void SampleListener::on(const events::StepSkipped& event) {
  observe([&](SampleState& state, double) { state.add(event); });
}

void SampleListener::on(const events::GradientsUnscaled& event) {
  observe([&](SampleState& state, double) { state.add(event); });
}

void SampleListener::on(const events::GradientsReady& event) {
  observe([&](SampleState& state, double) { state.add(event); });
}

void SampleListener::on(const events::PhaseBegan& event) {
  observe([&](SampleState& state, double now) { state.begin_phase(event.phase, now); });
}

void SampleListener::on(const events::PhaseEnded&) {
  observe([&](SampleState& state, double now) { state.end_phase(now); });
}

}  // namespace semitone::report
