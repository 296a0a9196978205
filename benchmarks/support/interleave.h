#pragma once

#include <functional>
#include <string>
#include <vector>

/// Timing several ways of doing the same, fairly.
namespace semitone::bench {

/// One way: what to time, by name. The body runs the work once.
struct Contender {
  std::string name;
  std::function<void()> body;
};

struct Timing {
  std::string name;
  double min_seconds;
  double median_seconds;
};

/// Runs the contenders in turn, round after round, so that what else happens on the machine happens to all of them. Each
/// round times `repeats` calls of each body and starts with another one. Two rounds before the first are not counted.
std::vector<Timing> interleave(const std::vector<Contender>& contenders, int rounds, int repeats);

/// A table: name, min and median of a call in units of `per` (1e-6: microseconds) and the ratio to the first contender.
/// @param divide  calls hold so many units of work: operators in a chain, steps
void print(const std::string& title, const std::vector<Timing>& timings, double per,
           const std::string& unit, double divide = 1);

}  // namespace semitone::bench
