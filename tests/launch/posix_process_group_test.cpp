#include "src/launch/posix_process_group.h"

#include "tests/support/processes.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>

namespace semitone::launch {
namespace {

TEST(ProcessGroup, IsAliveWhileOneOfItLives) {
  const pid_t leader = ::fork();
  if (leader == 0) {
    ::setpgid(0, 0);
    if (::fork() == 0) {
      while (true) ::pause();
    }
    ::_exit(0);
  }
  ::setpgid(leader, leader);
  ASSERT_TRUE(test::eventually([&] { return !test::is_running(leader); }));
  EXPECT_TRUE(is_group_alive(leader));
  ASSERT_EQ(::kill(-leader, SIGKILL), 0);
  // The leader is a zombie still: it keeps the group known, not alive.
  EXPECT_TRUE(test::eventually([&] { return !is_group_alive(leader); }));
  EXPECT_EQ(::kill(-leader, 0), 0);
  ASSERT_EQ(::waitpid(leader, nullptr, 0), leader);
  EXPECT_FALSE(is_group_alive(leader));
}

// /proc calls it a zombie.
TEST(ProcessGroup, IsAliveWhileAThreadContinuesAfterTheFirst) {
  const pid_t leader = ::fork();
  if (leader == 0) {
    ::setpgid(0, 0);
    std::thread([] { ::pause(); }).detach();
    ::syscall(SYS_exit, 0);
  }
  ::setpgid(leader, leader);
  ASSERT_TRUE(test::eventually([&] { return !test::is_running(leader); }));
  EXPECT_TRUE(is_group_alive(leader));
  ASSERT_EQ(::kill(-leader, SIGKILL), 0);
  ASSERT_EQ(::waitpid(leader, nullptr, 0), leader);
  EXPECT_FALSE(is_group_alive(leader));
}

}  // namespace
}  // namespace semitone::launch
