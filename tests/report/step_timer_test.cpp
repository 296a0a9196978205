#include "src/report/step_timer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

namespace semitone::report::step_timer_test {
namespace {

using events::Phase;
using testing::ElementsAre;

// The parts in the order of Phase, and the rest.
std::vector<double> parts_of(const StepTimer& timer, double end) {
  const StepTimer::Parts parts = timer.parts(end);
  std::vector<double> seconds(parts.phases.begin(), parts.phases.end());
  seconds.push_back(parts.other);
  double sum = 0;
  for (const double part : seconds) sum += part;
  EXPECT_DOUBLE_EQ(sum, parts.total);
  return seconds;
}

TEST(StepTimer, AStepWithoutEventsAndNodesIsOther) {
  const StepTimer timer(2);
  EXPECT_THAT(parts_of(timer, 10), ElementsAre(0, 0, 0, 0, 0, 0, 8));
}

TEST(StepTimer, APartInterruptsTheOneInProgress) {
  StepTimer timer(0);
  timer.begin_phase(Phase::data, 1);
  timer.end_phase(3);
  timer.begin_phase(Phase::backward, 4);
  timer.begin_phase(Phase::communication, 6);
  EXPECT_EQ(timer.phase(), Phase::communication);
  timer.end_phase(7);
  timer.end_phase(11);
  timer.begin_phase(Phase::optimizer, 11);
  timer.end_phase(12);
  EXPECT_EQ(timer.phase(), std::nullopt);
  EXPECT_THAT(parts_of(timer, 20), ElementsAre(2, 0, 6, 1, 0, 1, 10));
}

TEST(StepTimer, PassesAreThoseOfTheGraphWithoutEvents) {
  StepTimer timer(0);
  timer.begin_phase(Phase::data, 0);
  timer.end_phase(2);
  EXPECT_FALSE(timer.has_nodes());
  timer.begin_node(10);  // nested nodes, as of a checkpoint
  timer.begin_node(11);
  timer.end_node(12);
  timer.begin_phase(Phase::communication, 13);
  timer.end_phase(14);
  timer.end_node(18);
  EXPECT_TRUE(timer.has_nodes());
  timer.begin_forward_operator(19);  // of a metric, say
  EXPECT_THAT(parts_of(timer, 20), ElementsAre(2, 8, 7, 1, 0, 0, 2));
}

TEST(StepTimer, GradientsMayBeAccumulatedInAStep) {
  StepTimer timer(0);
  for (const double begin : {0, 100}) {
    timer.begin_forward_operator(begin);
    timer.begin_forward_operator(begin + 5);
    timer.begin_node(begin + 10);
    timer.begin_forward_operator(begin + 11);  // of a node: does not end the pass
    timer.end_node(begin + 12);
    timer.begin_node(begin + 13);
    timer.end_node(begin + 40);
  }
  EXPECT_THAT(parts_of(timer, 150), ElementsAre(0, 20, 60, 0, 0, 0, 70));
}

TEST(StepTimer, EventsOfAPassReplaceWhatTheGraphShows) {
  StepTimer timer(0);
  timer.begin_phase(Phase::forward, 1);
  timer.end_phase(3);
  timer.begin_node(5);
  timer.end_node(9);
  EXPECT_THAT(parts_of(timer, 10), ElementsAre(0, 2, 4, 0, 0, 0, 4));
}

TEST(StepTimer, APartMayBeginBeforeAndEndAfterTheStep) {
  StepTimer timer(0);
  timer.end_phase(1);
  timer.begin_phase(Phase::data, 5);
  EXPECT_THAT(parts_of(timer, 6), ElementsAre(1, 0, 0, 0, 0, 0, 5));
}

}  // namespace
}  // namespace semitone::report::step_timer_test
