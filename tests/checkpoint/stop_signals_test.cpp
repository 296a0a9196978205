#include "semitone/checkpoint/stop_signals.h"

#include "semitone/core/error.h"

#include <gtest/gtest.h>

#include <csignal>

namespace semitone::checkpoint::test {
namespace {

int signals_of_the_program = 0;

TEST(StopSignals, ReportsTheFirstAndRestoresTheHandlers) {
  const auto before = std::signal(SIGTERM, [](int) { ++signals_of_the_program; });
  {
    const StopSignals signals;
    EXPECT_EQ(signals.received(), 0);
    std::raise(SIGUSR1);
    std::raise(SIGTERM);
    EXPECT_EQ(signals.received(), SIGUSR1);
    EXPECT_EQ(signals_of_the_program, 0);
  }
  std::raise(SIGTERM);
  EXPECT_EQ(signals_of_the_program, 1);
  EXPECT_EQ(StopSignals().received(), 0) << "a new object has an old signal";
  std::signal(SIGTERM, before);
}

TEST(StopSignals, LeavesASignalThatIsIgnored) {
  const auto before = std::signal(SIGHUP, SIG_IGN);
  const StopSignals signals;
  std::raise(SIGHUP);
  EXPECT_EQ(signals.received(), 0);
  std::signal(SIGHUP, before);
}

TEST(StopSignals, ExistsOnce) {
  {
    const StopSignals signals;
    EXPECT_THROW(StopSignals(), Error);
    std::raise(SIGTERM);
    EXPECT_EQ(signals.received(), SIGTERM) << "the second object has restored the handlers";
  }
  EXPECT_NO_THROW(StopSignals());
}

}  // namespace
}  // namespace semitone::checkpoint::test
