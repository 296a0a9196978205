#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace semitone::train {

// How often a training saves on the way: after a number of steps or after a time, not both.
struct SaveInterval {
  std::int64_t steps = 0;        // 0: not by steps
  std::chrono::seconds time{0};  // 0: not by time

  bool is_set() const { return steps > 0 || time.count() > 0; }
};

// Parses a number of steps, minutes or seconds: "100", "100steps", "5min", "90s". "0" sets nothing.
// Returns std::nullopt for anything else, and for numbers above 10^9.
std::optional<SaveInterval> parse_save_interval(std::string_view text);

// "every 100 steps", "every 5 min", "every 90 s"; "at the end" if nothing is set.
std::string describe(const SaveInterval& interval);

}  // namespace semitone::train
