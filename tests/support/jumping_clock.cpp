// Loaded with LD_PRELOAD: the wall clock jumps a day ahead and a day back again, five times a
// second. Deadlines that are computed from it are then far away or long past.
// NOLINTBEGIN(readability-identifier-naming,readability-inconsistent-declaration-parameter-name):
// the C library's names.
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>

namespace {

constexpr std::int64_t kDay = 86'400;
constexpr std::int64_t kNanosecondsOfJump = 200'000'000;

std::int64_t seconds_ahead() {
  timespec steady{};
  ::syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &steady);
  const std::int64_t now = steady.tv_sec * 1'000'000'000 + steady.tv_nsec;
  return now / kNanosecondsOfJump % 2 * kDay;
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* now) noexcept {
  const auto result = static_cast<int>(::syscall(SYS_clock_gettime, clock, now));
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    now->tv_sec += seconds_ahead();
  return result;
}

int gettimeofday(timeval* now, void* /*zone*/) noexcept {
  timespec precise{};
  clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* now) noexcept {
  timespec precise{};
  clock_gettime(CLOCK_REALTIME, &precise);
  if (now != nullptr) *now = precise.tv_sec;
  return precise.tv_sec;
}
}
// NOLINTEND(readability-identifier-naming,readability-inconsistent-declaration-parameter-name)
