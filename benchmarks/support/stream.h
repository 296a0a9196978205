#pragma once

#include "benchmarks/support/interleave.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace semitone::bench {

/// What memory gives: `y += x` in fp32, the plainest update in place. It reads x and y and writes y, all
/// of which memory moves; a kernel that writes a new tensor makes the processor read what it writes to
/// as well, which is not counted for it.
class Stream {
 public:
  /// @param elements  of x and of y: both together should be far larger than the caches
  explicit Stream(std::int64_t elements);

  /// Takes the tensors along.
  Contender contender() const;
  /// Of one call.
  double bytes() const;

 private:
  at::Tensor x_;
  at::Tensor y_;
};

}  // namespace semitone::bench
