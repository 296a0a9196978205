#include "src/train/meter.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace semitone::train {

void StepMeter::add(double seconds, std::int64_t items) {
  seconds_.push_back(seconds);
  total_seconds_ += seconds;
  items_ += items;
}

double StepMeter::mean_ms() const {
  return seconds_.empty() ? 0 : 1e3 * total_seconds_ / static_cast<double>(seconds_.size());
}

double StepMeter::median_ms() const {
  if (seconds_.empty()) return 0;
  std::vector<double> sorted = seconds_;
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  if (sorted.size() % 2 == 1) return 1e3 * *middle;
  return 1e3 * (*middle + *std::max_element(sorted.begin(), middle)) / 2;
}

double StepMeter::items_per_second() const {
  return total_seconds_ > 0 ? static_cast<double>(items_) / total_seconds_ : 0;
}

std::int64_t peak_rss_bytes() {
  // Not getrusage: its maximum includes the parent's, from between fork and exec.
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    std::int64_t kilobytes = 0;
    if (word == "VmHWM:" && status >> kilobytes) return 1024 * kilobytes;
  }
  return 0;
}

}  // namespace semitone::train
