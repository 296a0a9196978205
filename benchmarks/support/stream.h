#pragma once

#include "benchmarks/support/interleave.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace semitone::bench {

/// The memory bandwidth. On a CPU: `y += x` in fp32, the simplest update in place. It reads x and y
/// and writes y, and memory moves all of these. On other devices: a copy of x to y. A kernel that writes a new tensor makes the processor
/// also read the memory that it writes to, which is not counted for the kernel.
class Stream {
 public:
  /// @param elements  of x and of y; both together should be far larger than the caches
  explicit Stream(std::int64_t elements, at::Device device = at::kCPU);

  /// Takes the tensors along.
  Contender contender() const;
  /// Of one call.
  double bytes() const;

 private:
  at::Tensor x_;
  at::Tensor y_;
};

}  // namespace semitone::bench
