#pragma once

#include "src/kernels/attention_blocks.h"
#include "src/kernels/attention_kernel.h"
#include "src/kernels/dropout.h"

#include <cstdint>
#include <optional>

namespace semitone::kernels::blocked_attention {

// Which probabilities of a block are dropped. For one thread.
class DroppedBlock {
 public:
  // @param keys  the most in a block
  DroppedBlock(const std::optional<Dropout>& dropout, const Shape& shape, std::int64_t keys);

  // For blocks of queries and keys from these on; the next call overwrites the bits. `key` is a
  // multiple of kDropoutGroup.
  DroppedScores at(std::int64_t batch, std::int64_t head, std::int64_t query, std::int64_t queries,
                   std::int64_t key, std::int64_t keys);

  // Of the probabilities that are not dropped.
  float scale() const { return scale_; }

 private:
  const std::optional<Dropout>& dropout_;
  const Shape& shape_;
  float scale_;
  Memory<std::uint32_t> bits_;
};

}  // namespace semitone::kernels::blocked_attention
