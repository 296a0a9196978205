#include "benchmarks/support/interleave.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstddef>

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
    const auto& times = seconds[who];
    timings.push_back(
        {contenders[who].name, *std::min_element(times.begin(), times.end()), median(times)});
  }
  return timings;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values.at(values.size() / 2);
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
