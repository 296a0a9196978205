#include "src/report/observation.h"

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

Observation::Observation(std::atomic<double>& total)
    : total_(total),
      began_(steady_seconds()),
      step_time_(began_ - total.load()),
      thread_time_(began_ - observed_here().observed) {
  ++observed_here().observations;
}

Observation::~Observation() {
  OfThread& here = observed_here();
  if (--here.observations > 0) return;  // part of another one
  const double seconds = steady_seconds() - began_;
  here.observed += seconds;
  total_.fetch_add(seconds);
}

}  // namespace semitone::report
