#pragma once

#include <functional>
#include <string>
#include <vector>

/// Times several implementations of the same work fairly.
namespace semitone::bench {

/// A contender: its name, and a body that runs the work once.
struct Contender {
  std::string name;
  std::function<void()> body;
};

struct Timing {
  std::string name;
  double min_seconds;
  double median_seconds;
};

/// Runs the contenders in interleaved rounds, so that other load on the machine affects all of
/// them. Each round times `repeats` calls of each body and starts with another contender. Two
/// rounds before the first are not counted.
/// @param wait  called after the calls and before the clock is read, to wait for a device
std::vector<Timing> interleave(const std::vector<Contender>& contenders, int rounds, int repeats,
                               const std::function<void()>& wait = {});

/// The middle one of the values in order; of two, the larger.
double median(std::vector<double> values);

/// A table: name, min and median of a call in units of `per` (1e-6: microseconds) and the ratio to
/// the first contender.
/// @param divide  number of units of work per call: operators in a chain, steps
void print(const std::string& title, const std::vector<Timing>& timings, double per,
           const std::string& unit, double divide = 1);

}  // namespace semitone::bench
