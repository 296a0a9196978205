#pragma once

#include "semitone/core/events.h"

#include <array>
#include <cstddef>
#include <optional>
#include <vector>

namespace semitone::report {

// Divides the time of a step among its parts. All times are in seconds, of one clock.
//
// A part that an event begins interrupts the one in progress. Without events, the backward pass is
// the time of the nodes of the graph, and the forward pass is the time before it. A training that
// accumulates gradients has several of both in a step.
class StepTimer {
 public:
  static constexpr std::size_t kPhases = 6;

  struct Parts {
    std::array<double, kPhases> phases{};  // by events::Phase
    double other = 0;
    double total = 0;
  };

  explicit StepTimer(double now) : begin_(now), forward_begin_(now), mark_(now) {}

  // Events, on the recorder's thread.
  void begin_phase(events::Phase phase, double now);
  void end_phase(double now);
  // The part in progress.
  std::optional<events::Phase> phase() const;

  // Nodes of the graph, on any thread.
  void begin_node(double now);
  void end_node(double now);
  bool has_nodes() const { return backward_begin_.has_value() || !passes_.empty(); }
  // An operator of the forward pass: a backward pass before it has ended.
  void begin_forward_operator(double now);

  // The parts until now.
  Parts parts(double now) const;

 private:
  struct Span {
    std::optional<events::Phase> phase;
    double begin;
    double end;
  };
  void mark(double now);

  double begin_;
  // Parts of events, without gaps; no phase: between them.
  std::vector<Span> spans_;
  std::vector<events::Phase> nested_;
  // Passes as the graph shows them.
  std::vector<Span> passes_;
  std::optional<double> forward_begin_;   // not ended by a node
  std::optional<double> backward_begin_;  // not ended by an operator of a forward pass
  double backward_end_ = 0;
  int nodes_ = 0;  // in progress
  double mark_;    // the end of the last span
};

}  // namespace semitone::report
