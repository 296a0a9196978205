#pragma once

#include "src/kernels/attention_blocks.h"
#include "src/kernels/attention_kernel.h"
#include "src/kernels/dropout.h"

#include <cstdint>
#include <optional>

namespace semitone::kernels::blocked_attention {

// Computes which probabilities of a block are dropped. Each thread needs its own.
class DroppedBlock {
 public:
  // @param dropout, shape  must outlive it
  // @param keys            the most in a block
  DroppedBlock(const std::optional<Dropout>& dropout, const Shape& shape, std::int64_t keys);

  // For blocks of queries and keys from these on; the next call overwrites the bits. `key` is a
  // multiple of kDropoutGroup.
  DroppedScores at(std::int64_t batch, std::int64_t head, std::int64_t query, std::int64_t queries,
                   std::int64_t key, std::int64_t keys);

  // The factor of the kept probabilities, 1 / (1 - p); 1 without dropout.
  float scale() const { return scale_; }

 private:
  const std::optional<Dropout>& dropout_;
  const Shape& shape_;
  float scale_;
  Memory<std::uint32_t> bits_;
};

}  // namespace semitone::kernels::blocked_attention
