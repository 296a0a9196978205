#include "src/launch/worker_group.h"

#include "src/launch/attempt.h"
#include "src/launch/channel.h"
#include "src/launch/descriptor.h"
#include "src/launch/interrupt.h"
#include "src/launch/messages.h"
#include "src/launch/output_relay.h"
#include "src/launch/worker_reaper.h"
#include "tests/launch/launcher_fixture.h"
#include "tests/support/processes.h"
#include "tests/support/temporary_folder.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <future>
#include <memory>
#include <utility>

namespace {

// Processes that wait for a disk or a driver do not react to SIGKILL: none of these does.
thread_local bool all_are_deaf = false;

}  // namespace

// Replaces the C library's function.
extern "C" int kill(pid_t id, int signal) noexcept {
  if (all_are_deaf && signal == SIGKILL) return 0;
  return static_cast<int>(::syscall(SYS_kill, id, signal));
}

namespace semitone::launch {
namespace {

using namespace std::chrono_literals;

TEST(WorkerGroup, GivesUpWhatSigkillDoesNotEndHoweverOftenItIsTold) {
  const test::TemporaryFolder folder;
  const auto options = LaunchOptions("/bin/sh").arguments(
      {"-c", "trap '' INT TERM; echo $$ > " + (folder / "ids").string() + "; exec sleep 1000"});
  WorkerReaper reaper(1);
  OutputRelay relay;
  WorkerGroup group(options, Assignment(), relay, reaper);
  ASSERT_TRUE(test::eventually([&] { return test::ids_in(folder / "ids").size() == 1; }));
  const pid_t id = test::ids_in(folder / "ids").front();

  all_are_deaf = true;
  const Time begin = Clock::now();
  group.stop(SIGINT, begin);
  group.stop(SIGKILL, begin);
  Time now = begin;
  for (; now < begin + 30s; now += 1s) {
    group.update(now);
    group.stop(SIGKILL, now);
    EXPECT_FALSE(group.has_ended());
    // A launcher that never waits would take a core for itself.
    EXPECT_GT(group.deadline(now), now);
  }
  group.update(now);
  EXPECT_TRUE(group.has_ended());
  EXPECT_TRUE(group.statuses().front().stopped);
  EXPECT_TRUE(test::is_running(id));
  all_are_deaf = false;
  ASSERT_EQ(::kill(id, SIGKILL), 0);
}

// Once the group is empty, its number may be reused.
TEST(WorkerGroup, WatchesTheGroupOfAProcessThatHasEndedWhileOthersContinue) {
  const auto options =
      LaunchOptions("/bin/sh")
          .arguments({"-c", "[ $RANK = 1 ] && exec sleep 1000; sleep 1000 & exit 0"})
          .nproc_per_node(2);
  WorkerReaper reaper(2);
  OutputRelay relay;
  WorkerGroup group(options, Assignment(), relay, reaper);
  EXPECT_TRUE(test::eventually([&] {
    const Time now = Clock::now();
    group.update(now);
    const Time deadline = group.deadline(now);
    EXPECT_GT(deadline, now);
    return deadline < Time::max();
  }));
}

// Between node 0's answer and the start of the processes.
TEST(Attempt, EndsAfterASignalThatTheRendezvousHasAcknowledged) {
  const auto options = LaunchOptions("sleep").arguments({"1000"});
  Interrupt interrupt;
  interrupt.request(SIGTERM);
  interrupt.acknowledge();
  // Node 0 is there, and says nothing.
  auto [socket, node0] = socket_pair();
  Channel channel(std::move(socket), 24h);
  WorkerReaper reaper(1);
  OutputRelay relay;
  Attempt attempt(options, Assignment(), interrupt, channel, relay, reaper);
  auto outcome = std::async(std::launch::async, [&] { return attempt.run(); });
  EXPECT_TRUE(test::eventually([&] { return outcome.wait_for(0s) == std::future_status::ready; }));
  // Otherwise a failed test would not end.
  interrupt.request(SIGKILL);
  EXPECT_EQ(outcome.get().kind, Outcome::Kind::lost);
  EXPECT_EQ(attempt.statuses().at(0).status.signal, SIGTERM);
}

TEST(WorkerReaper, EndsAlthoughAForkedProcessHasACopyOfItsSocket) {
  auto reaper = std::make_unique<WorkerReaper>(1);
  auto copy = std::make_unique<ForkedProcess>();
  auto end = std::async(std::launch::async, [&] { reaper.reset(); });
  EXPECT_TRUE(test::eventually([&] { return end.wait_for(0s) == std::future_status::ready; }));
  // Otherwise a failed test would not end.
  copy.reset();
}

}  // namespace
}  // namespace semitone::launch
