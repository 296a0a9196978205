#include "src/report/observation.h"

#include <gtest/gtest.h>

#include <thread>

namespace semitone::report::observation_test {
namespace {

void work() {
  const double begin = steady_seconds();
  while (steady_seconds() < begin + 1e-3) {
  }
}

TEST(Observation, OfSeveralThreadsAtOnceCountsOnceForTheStep) {
  ObservedTime observed;
  double first = 0;
  {
    const Observation outer(observed);
    first = outer.step_time();
    std::thread([&] {
      const Observation other(observed);
      EXPECT_EQ(other.step_time(), first);  // the step's clock stands still
      work();
    }).join();
  }
  const Observation after(observed);
  EXPECT_GE(after.step_time(), first);
}

TEST(Observation, StopsTheClockOfItsThreadOnly) {
  ObservedTime observed;
  const double before = Observation(observed).thread_time();
  std::thread([&] {
    const Observation other(observed);
    work();
  }).join();
  EXPECT_GE(Observation(observed).thread_time(), before + 1e-3);
}

}  // namespace
}  // namespace semitone::report::observation_test
