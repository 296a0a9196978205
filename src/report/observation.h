#pragma once

#include <atomic>

namespace semitone::report {

// Seconds of a steady clock.
double steady_seconds();

// A time in which a recorder itself works, on one thread. It counts neither for the step nor for the
// operators in progress.
class [[nodiscard]] Observation {
 public:
  // @param total  seconds of all observations of the step; this one is added at its end
  explicit Observation(std::atomic<double>& total);
  ~Observation();
  Observation(const Observation&) = delete;
  Observation& operator=(const Observation&) = delete;

  // When it began, on the step's clock and on this thread's clock, which stand still meanwhile.
  double step_time() const { return step_time_; }
  double thread_time() const { return thread_time_; }

 private:
  std::atomic<double>& total_;
  double began_;
  double step_time_;
  double thread_time_;
};

}  // namespace semitone::report
