#include "src/report/observation.h"

#include <algorithm>
#include <chrono>

namespace semitone::report {
namespace {

struct OfThread {
  double observed = 0;  // seconds
  int observations = 0;
};

OfThread& observed_here() {
  static thread_local OfThread of_this_thread;
  return of_this_thread;
}

}  // namespace

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double ObservedTime::begin(double now) {
  const std::lock_guard lock(mutex_);
  if (observations_++ == 0) began_ = now;
  return began_ - total_;
}

void ObservedTime::end(double now) {
  const std::lock_guard lock(mutex_);
  if (--observations_ == 0) total_ += std::max(0.0, now - began_);
}

Observation::Observation(ObservedTime& observed)
    : observed_(observed),
      began_(steady_seconds()),
      step_time_(observed.begin(began_)),
      thread_time_(began_ - observed_here().observed) {
  ++observed_here().observations;
}

Observation::~Observation() {
  const double now = steady_seconds();
  observed_.end(now);
  OfThread& here = observed_here();
  if (--here.observations == 0) here.observed += now - began_;  // else part of another one
}

}  // namespace semitone::report
