#pragma once

#include <algorithm>
#include <chrono>

namespace semitone::comm {

// The longest duration that options and calls take. Time points that are this far away do not
// overflow, and c10d's stores pass their timeout to poll() as an int of milliseconds: 24.8 days.
inline constexpr std::chrono::milliseconds kMaxDuration = std::chrono::days(24);

// For callers to whom milliseconds::max() means "never".
inline std::chrono::milliseconds limited(std::chrono::milliseconds value) {
  return std::min(value, kMaxDuration);
}

}  // namespace semitone::comm
