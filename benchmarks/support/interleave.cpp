#include "benchmarks/support/interleave.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

namespace semitone::bench {

std::vector<Timing> interleave(const std::vector<Contender>& contenders, int rounds, int repeats,
                               const std::function<void()>& wait) {
  using Clock = std::chrono::steady_clock;
  constexpr int kWarmUp = 2;
  const std::size_t count = contenders.size();
  std::vector<std::vector<double>> seconds(count);
  for (int round = -kWarmUp; round < rounds; ++round) {
    for (std::size_t turn = 0; turn < count; ++turn) {
      const std::size_t who = (turn + static_cast<std::size_t>(round + kWarmUp)) % count;
      const auto begin = Clock::now();
      for (int repeat = 0; repeat < repeats; ++repeat) contenders[who].body();
      if (wait) wait();
      const std::chrono::duration<double> spent = Clock::now() - begin;
      if (round >= 0) seconds[who].push_back(spent.count() / repeats);
    }
  }
  std::vector<Timing> timings;
  for (std::size_t who = 0; who < count; ++who) {
    auto& times = seconds[who];
    std::sort(times.begin(), times.end());
    timings.push_back({contenders[who].name, times.front(), times[times.size() / 2]});
  }
  return timings;
}

void print(const std::string& title, const std::vector<Timing>& timings, double per,
           const std::string& unit, double divide) {
  fmt::print("{}\n{:<34} {:>12} {:>12} {:>8} {:>8}\n", title, "", "min " + unit, "median " + unit,
             "ratio", "(median)");
  const Timing& first = timings.front();
  for (const Timing& timing : timings) {
    fmt::print("{:<34} {:>12.3f} {:>12.3f} {:>7.2f}x {:>7.2f}x\n", timing.name,
               timing.min_seconds / per / divide, timing.median_seconds / per / divide,
               first.min_seconds / timing.min_seconds,
               first.median_seconds / timing.median_seconds);
  }
  fmt::print("\n");
}

}  // namespace semitone::bench
