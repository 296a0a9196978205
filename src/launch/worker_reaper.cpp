#include "src/launch/worker_reaper.h"

#include "semitone/core/error.h"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <vector>

namespace semitone::launch {
namespace {

constexpr auto kWorkerReaper = "launch.launcher";

// Closes the descriptors in a range, below the limit. Linux knows the call from version 5.9 on, and
// containers may refuse it.
void close_from(int first, int last, int limit) {
  if (first > last || ::syscall(SYS_close_range, static_cast<unsigned>(first),
                                static_cast<unsigned>(last), 0U) == 0)
    return;
  for (int descriptor = first; descriptor <= std::min(last, limit - 1); ++descriptor)
    ::close(descriptor);
}

// One more than the largest descriptor to close one by one. Containers allow a billion, which would
// take minutes.
int descriptor_limit() {
  constexpr long kMost = 1 << 16;
  const long limit = ::sysconf(_SC_OPEN_MAX);
  return static_cast<int>(limit < 0 ? kMost : std::min(limit, kMost));
}

// The reaper's main loop, in a forked process that may use async-signal-safe calls only.
[[noreturn]] void watch(int socket, std::vector<pid_t>& groups, int limit) {
  ::setsid();
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2})
    ::signal(signal, SIG_IGN);
  ::prctl(PR_SET_NAME, "semitone-reaper");
  // A reader that waits for the end of this process's output must not wait for the reaper's.
  close_from(0, socket - 1, limit);
  close_from(socket + 1, INT_MAX, limit);
  while (true) {
    pollfd event{socket, POLLIN, 0};
    ::poll(&event, 1, -1);
    pid_t message = 0;
    const ssize_t count = ::read(socket, &message, sizeof message);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count != static_cast<ssize_t>(sizeof message)) break;
    // A group, or the negative of one that has ended.
    const pid_t before = message > 0 ? 0 : -message;
    const pid_t after = message > 0 ? message : 0;
    const auto place = std::find(groups.begin(), groups.end(), before);
    if (place != groups.end()) *place = after;
  }
  for (const pid_t group : groups) {
    if (group > 0) ::kill(-group, SIGKILL);
  }
  ::_exit(0);
}

}  // namespace

WorkerReaper::WorkerReaper(int max_groups) {
  std::vector<pid_t> groups(static_cast<std::size_t>(max_groups), 0);
  auto [ours, theirs] = socket_pair();
  const int limit = descriptor_limit();
  id_ = ::fork();
  if (id_ == 0) watch(theirs.number(), groups, limit);
  if (id_ < 0) throw Error(kWorkerReaper, "another process from the system", reason_of(errno));
  socket_ = std::move(ours);
}

WorkerReaper::~WorkerReaper() {
  // Not only closed: a process that another thread has forked may still have a copy, and the reaper
  // would see no end before that process's.
  ::shutdown(socket_.number(), SHUT_RDWR);
  socket_.close();
  while (::waitpid(id_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void WorkerReaper::remove(pid_t group) {
  send_number(socket_.number(), -group);
}

}  // namespace semitone::launch
