#include "src/net/polling.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

namespace semitone::net {
namespace {

using namespace std::chrono_literals;

TEST(Polling, EndsWithItsTime) {
  const WakeEvent event;
  std::vector<pollfd> events{{-1, POLLIN, 0}, {event.descriptor(), POLLIN, POLLIN}};
  const Time until = Clock::now() + 20ms;
  poll_until(events, until);
  EXPECT_GE(Clock::now(), until);
  EXPECT_EQ(events[1].revents, 0);
  poll_until(events, until - 1h);
}

TEST(Polling, EndsWithAnEvent) {
  const WakeEvent event;
  std::vector<pollfd> events{{event.descriptor(), POLLIN, 0}};
  std::thread thread([&] { event.set(); });
  poll_until(events, Time::max());
  thread.join();
  EXPECT_EQ(events[0].revents, POLLIN);
  event.set();
  event.clear();
  poll_until(events, Clock::now());
  EXPECT_EQ(events[0].revents, 0);
}

}  // namespace
}  // namespace semitone::net
