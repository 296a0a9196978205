#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace semitone::train {

/// How long steps take.
class StepMeter {
 public:
  /// @param items  how many images the step trained on
  void add(double seconds, std::int64_t items);

  std::int64_t steps() const { return static_cast<std::int64_t>(seconds_.size()); }
  /// Of the steps added; 0 without any. The median is what a step costs, the mean has the outliers
  /// in it (the first step, which sets up kernels; other programs on the machine).
  double mean_ms() const;
  double median_ms() const;
  /// Items over seconds, of all steps; 0 without any.
  double items_per_second() const;

 private:
  std::vector<double> seconds_;
  double total_seconds_ = 0;
  std::int64_t items_ = 0;
};

/// The most memory that this process ever had in RAM (VmHWM): everything, LibTorch's own code and
/// tables included. Since the program was started, not since a fork.
std::int64_t peak_rss_bytes();

/// Counts the bytes of all tensors that this thread and the threads that work for it (autograd's,
/// at::launch's) allocate while it lives: weights, gradients, optimizer state, activations,
/// workspaces, on every device. What was there before does not count, nor does what only other
/// threads allocate or free. Freeing it is counted, also after the objects that it was allocated
/// for.
///
/// It listens where LibTorch reports allocations to its profiler, one map entry an allocation
/// (under 1 % of a ConvNet step of 10 ms). Meters nest. LibTorch has one place for such a listener:
/// inside its profiler's region the meter measures nothing (is_active() is false), a profiler that
/// starts inside the meter's scope has the place until it stops.
///
/// LibTorch notes once on stderr if a block from before is freed meanwhile; construct the meter
/// before what it is to measure.
///
/// Destroy on the thread that constructed it, in the reverse order of construction.
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
