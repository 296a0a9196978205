#pragma once

#include <cstdint>
#include <memory>
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

// Counts the bytes of all tensors that this thread, and the threads that work for it (autograd's,
// at::launch's), allocate while the meter exists: weights, gradients, optimizer state, activations
// and workspaces, on every device. Tensors from before do not count, nor do those that only other
// threads allocate or free. Freeing counted memory is counted too, also after the meter's scope.
//
// The meter listens where LibTorch reports allocations to its profiler. An allocation costs one
// map entry (under 1 % of a ConvNet step of 10 ms). Meters nest. LibTorch has one place for such a
// listener. Inside a region of its profiler the meter therefore measures nothing (is_active() is
// false), and a profiler that starts inside the meter's scope has the place until it stops.
//
// LibTorch notes once on stderr if a block from before is freed during that time, so construct the
// meter before the tensors that it is to measure.
//
// Destroy it on the thread that constructed it, in the reverse order of construction.
class [[nodiscard]] TensorMemoryMeter {
 public:
  TensorMemoryMeter();
  ~TensorMemoryMeter();
  TensorMemoryMeter(const TensorMemoryMeter&) = delete;
  TensorMemoryMeter& operator=(const TensorMemoryMeter&) = delete;

  bool is_active() const;
  std::int64_t current_bytes() const;
  std::int64_t peak_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace semitone::train
