#pragma once

#include <mutex>

namespace semitone::report {

// Seconds of a steady clock.
double steady_seconds();

// The time of a step in which a recorder itself works, on any thread. Times of several threads at once
// count once.
class ObservedTime {
 public:
  // An observation begins or ends now, in seconds. begin() returns the time of the step's clock.
  double begin(double now);
  void end(double now);

 private:
  std::mutex mutex_;
  int observations_ = 0;  // in progress
  double began_ = 0;      // the first of them
  double total_ = 0;      // of those before
};

// A time in which a recorder itself works, on one thread. It counts neither for the step nor for the
// operators in progress.
class [[nodiscard]] Observation {
 public:
  // @param observed  of the step, to which this one belongs
  explicit Observation(ObservedTime& observed);
  ~Observation();
  Observation(const Observation&) = delete;
  Observation& operator=(const Observation&) = delete;

  // When it began, on the step's clock and on this thread's clock, which stand still meanwhile.
  double step_time() const { return step_time_; }
  double thread_time() const { return thread_time_; }

 private:
  ObservedTime& observed_;
  double began_;
  double step_time_;
  double thread_time_;
};

}  // namespace semitone::report
