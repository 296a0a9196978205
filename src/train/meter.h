#pragma once

#include <cstdint>
#include <vector>

namespace semitone::train {

// Measures the duration of steps.
class StepMeter {
 public:
  // @param items  number of images in the step
  void add(double seconds, std::int64_t items);

  std::int64_t steps() const { return static_cast<std::int64_t>(seconds_.size()); }
  // Statistics of the added steps; 0 without any. The median is the cost of a typical step. The
  // mean includes outliers: the first step, which sets up kernels, and other programs on the
  // machine.
  double mean_ms() const;
  double median_ms() const;
  // Items per second over all steps; 0 without any.
  double items_per_second() const;

 private:
  std::vector<double> seconds_;
  double total_seconds_ = 0;
  std::int64_t items_ = 0;
};

// Returns the largest resident memory of this process since the program was started (VmHWM). It
// includes LibTorch's own code and tables. A fork does not reset it.
std::int64_t peak_rss_bytes();

}  // namespace semitone::train
