#include "src/train/save_interval.h"

#include <fmt/format.h>

#include <charconv>
#include <system_error>

namespace semitone::train {

std::optional<SaveInterval> parse_save_interval(std::string_view text) {
  constexpr std::int64_t kLargest = 1'000'000'000;
  std::int64_t number = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0 || number > kLargest) return std::nullopt;
  const std::string_view unit = text.substr(static_cast<std::size_t>(rest - text.data()));
  SaveInterval interval;
  if (unit.empty() || unit == "steps") {
    interval.steps = number;
  } else if (unit == "min") {
    interval.time = std::chrono::minutes(number);
  } else if (unit == "s") {
    interval.time = std::chrono::seconds(number);
  } else {
    return std::nullopt;
  }
  // More would not fit in the clock's nanoseconds.
  return interval.time.count() > kLargest ? std::nullopt : std::optional(interval);
}

std::string describe(const SaveInterval& interval) {
  if (interval.steps > 0) return fmt::format("every {} steps", interval.steps);
  const auto seconds = interval.time.count();
  if (seconds == 0) return "at the end";
  return seconds % 60 == 0 ? fmt::format("every {} min", seconds / 60)
                           : fmt::format("every {} s", seconds);
}

}  // namespace semitone::train
