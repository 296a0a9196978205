#pragma once

#include <cstdint>
#include <memory>

namespace semitone {

// Counts the bytes of all tensors that this thread, and the threads that work for it (autograd's,
// at::launch's), allocate while the meter exists: weights, gradients, optimizer state, activations
// and workspaces, on every device. Tensors from before do not count, nor do those that only other
// threads allocate or free.
//
// The meter listens where LibTorch reports allocations to its profiler. An allocation costs one
// map entry (under 1 % of a ConvNet step of 10 ms). Meters nest. LibTorch has one place for such a
// listener. Inside a region of its profiler the meter therefore measures nothing (is_active() is
// false), and a profiler that starts inside the meter's scope has the place until it stops.
//
// LibTorch notes once on stderr if a block from before is freed during that time, so construct the
// meter before the tensors that it is to measure.
//
// Destroy it on the thread that constructed it. Meters, listeners of events, regions of autocast and
// regions of the profiler that were constructed later may outlive it.
class [[nodiscard]] TensorMemoryMeter {
 public:
  TensorMemoryMeter();
  ~TensorMemoryMeter();
  TensorMemoryMeter(const TensorMemoryMeter&) = delete;
  TensorMemoryMeter& operator=(const TensorMemoryMeter&) = delete;

  bool is_active() const;
  std::int64_t current_bytes() const;
  // The most bytes so far, or since reset_peak().
  std::int64_t peak_bytes() const;
  // Sets the peak to the current bytes.
  void reset_peak();

 private:
  class Ledger;
  std::shared_ptr<Ledger> ledger_;
  bool is_active_ = false;
};

}  // namespace semitone
