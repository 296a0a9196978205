#pragma once

#include "src/kernels/attention_blocks.h"
#include "src/kernels/attention_kernel.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace semitone::kernels::blocked_attention {

// The mask of a call, as fp32 numbers that are added to the scaled scores: 0 or -inf for a mask of
// bools. What is the same for all sequences, heads or queries is in memory once.
class Mask {
 public:
  // @param mask  undefined for none
  Mask(const at::Tensor& mask, const Shape& shape);

  // Makes a transposed copy for columns_at(), in place of what rows_at() needs.
  void transpose();

  // The number of keys up to the last one that a query of the block attends to; at least 1.
  std::int64_t seen(std::int64_t batch, std::int64_t head, std::int64_t block) const;

  // For the scores of queries (rows) and keys from these on. Before transpose().
  ScoreMask rows_at(std::int64_t batch, std::int64_t head, std::int64_t query,
                    std::int64_t key) const;

  // For the scores of keys (rows) and queries. After transpose().
  TransposedScoreMask columns_at(std::int64_t batch, std::int64_t head, std::int64_t query,
                                 std::int64_t key) const;

 private:
  std::int64_t head_at(std::int64_t batch, std::int64_t head) const;
  std::int64_t blocks_of_queries() const;
  void find_seen();

  std::int64_t keys_;
  std::int64_t sequences_ = 0;      // N or 1
  std::int64_t heads_ = 0;          // H or 1
  std::int64_t queries_ = 0;        // L or 1
  at::Tensor rows_;                 // (N or 1, H or 1, L or 1, S)
  at::Tensor columns_;              // (N or 1, H or 1, S, padded L, or 1)
  std::vector<std::int64_t> seen_;  // (N or 1, H or 1, blocks or 1)
};

}  // namespace semitone::kernels::blocked_attention
