#include "src/net/heartbeat.h"

#include <gtest/gtest.h>

namespace semitone::net {
namespace {

using namespace std::chrono_literals;

const Time kBegin = Clock::now();

TEST(HeartbeatTimer, IsDueOnceAnInterval) {
  HeartbeatTimer timer(10s, kBegin);
  EXPECT_EQ(timer.deadline(), kBegin + 10s);
  EXPECT_FALSE(timer.take_due(kBegin + 9s));
  EXPECT_TRUE(timer.take_due(kBegin + 12s));
  EXPECT_FALSE(timer.take_due(kBegin + 13s));
  EXPECT_EQ(timer.deadline(), kBegin + 22s);
}

TEST(SilenceTimer, ExpiresAfterTheTimeout) {
  SilenceTimer timer(60s, kBegin);
  EXPECT_FALSE(timer.has_expired(kBegin + 30s));
  timer.received(kBegin + 40s);
  EXPECT_EQ(timer.deadline(), kBegin + 100s);
  EXPECT_FALSE(timer.has_expired(kBegin + 60s));
  EXPECT_FALSE(timer.has_expired(kBegin + 80s));
  EXPECT_FALSE(timer.has_expired(kBegin + 99s));
  EXPECT_TRUE(timer.has_expired(kBegin + 100s));
}

TEST(SilenceTimer, DoesNotCountWhileThisProcessWasStopped) {
  SilenceTimer timer(60s, kBegin);
  EXPECT_FALSE(timer.has_expired(kBegin + 1000s));
  EXPECT_FALSE(timer.has_expired(kBegin + 1029s));
  EXPECT_FALSE(timer.has_expired(kBegin + 1058s));
  EXPECT_TRUE(timer.has_expired(kBegin + 1061s));
}

}  // namespace
}  // namespace semitone::net
