#include "src/report/step_timer.h"

#include <algorithm>

namespace semitone::report {
namespace {

std::size_t place_of(events::Phase phase) {
  return static_cast<std::size_t>(phase);
}

}  // namespace

void StepTimer::mark(double now) {
  spans_.push_back({phase(), mark_, std::max(mark_, now)});
  mark_ = spans_.back().end;
}

void StepTimer::begin_phase(events::Phase phase, double now) {
  mark(now);
  nested_.push_back(phase);
}

void StepTimer::end_phase(double now) {
  if (nested_.empty()) return;  // it began before the step
  mark(now);
  nested_.pop_back();
}

std::optional<events::Phase> StepTimer::phase() const {
  return nested_.empty() ? std::nullopt : std::optional(nested_.back());
}

void StepTimer::begin_node(double now) {
  ++nodes_;
  if (forward_begin_.has_value()) {
    passes_.push_back({events::Phase::forward, *forward_begin_, now});
    forward_begin_.reset();
  }
  if (!backward_begin_.has_value()) backward_begin_ = backward_end_ = now;
}

void StepTimer::end_node(double now) {
  nodes_ = std::max(0, nodes_ - 1);
  backward_end_ = std::max(backward_end_, now);
}

void StepTimer::begin_forward_operator(double now) {
  if (!backward_begin_.has_value() || nodes_ > 0) return;
  passes_.push_back({events::Phase::backward, *backward_begin_, backward_end_});
  backward_begin_.reset();
  forward_begin_ = now;
}

StepTimer::Parts StepTimer::parts(double now) const {
  StepTimer all = *this;
  all.mark(now);
  if (all.backward_begin_.has_value())
    all.passes_.push_back({events::Phase::backward, *all.backward_begin_, all.backward_end_});
  Parts parts;
  parts.total = all.mark_ - begin_;
  std::array<bool, kPhases> has_events{};
  for (const Span& span : all.spans_) {
    if (!span.phase.has_value()) continue;
    has_events[place_of(*span.phase)] = true;
    parts.phases[place_of(*span.phase)] += span.end - span.begin;
  }
  for (const Span& span : all.spans_) {
    if (span.phase.has_value()) continue;
    double rest = span.end - span.begin;
    for (const Span& pass : all.passes_) {
      if (has_events[place_of(*pass.phase)]) continue;
      const double time = std::min(span.end, pass.end) - std::max(span.begin, pass.begin);
      if (time <= 0) continue;
      parts.phases[place_of(*pass.phase)] += time;
      rest -= time;
    }
    parts.other += rest;
  }
  return parts;
}

}  // namespace semitone::report
