#include "src/kernels/attention_mask.h"

#include "src/core/parallel_for.h"
#include "src/kernels/attention.h"

#include <torch/types.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

namespace semitone::kernels::blocked_attention {
namespace {

// (N or 1, H or 1, L or 1, S) in fp32.
at::Tensor numbers_of(const at::Tensor& mask, std::int64_t keys) {
  at::Tensor wide = without_repetitions(mask);
  while (wide.dim() < 4) wide = wide.unsqueeze(0);
  wide = wide.expand({-1, -1, -1, keys});
  if (wide.scalar_type() != at::kBool) return wide.resolve_neg().to(at::kFloat).contiguous();
  const auto number = [](float value) { return at::scalar_tensor(value, at::kFloat); };
  return at::where(wide, number(0), number(-kInfinity)).contiguous();
}

// The number of keys up to the last one that a query attends to, or `least` if that is more.
std::int64_t seen_keys(const float* row, std::int64_t keys, std::int64_t least) {
  while (keys > least && row[keys - 1] == -kInfinity) --keys;
  return keys;
}

}  // namespace

Mask::Mask(const at::Tensor& mask, const Shape& shape) : keys_(shape.keys) {
  if (!mask.defined()) return;
  rows_ = numbers_of(mask, keys_);
  sequences_ = rows_.size(0);
  heads_ = rows_.size(1);
  queries_ = rows_.size(2);
  find_seen();
}

void Mask::find_seen() {
  const std::int64_t blocks = blocks_of_queries();
  seen_.resize(static_cast<std::size_t>(sequences_ * heads_ * blocks));
  const auto* const numbers = rows_.const_data_ptr<float>();
  parallel_for(0, std::ssize(seen_), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t first = i % blocks * kQueries;
      const float* const block = numbers + (i / blocks * queries_ + first) * keys_;
      std::int64_t seen = 1;
      for (std::int64_t row = 0; row < std::min(kQueries, queries_ - first); ++row)
        seen = seen_keys(block + row * keys_, keys_, seen);
      seen_[static_cast<std::size_t>(i)] = seen;
    }
  });
}

void Mask::transpose() {
  if (!rows_.defined()) return;
  const at::Tensor rows = std::exchange(rows_, {}).transpose(2, 3);
  if (queries_ == 1) {
    columns_ = rows.contiguous();
    return;
  }
  columns_ = at::zeros({sequences_, heads_, keys_, padded(queries_)}, rows.options());
  columns_.narrow(3, 0, queries_).copy_(rows);
}

std::int64_t Mask::blocks_of_queries() const {
  return (queries_ + kQueries - 1) / kQueries;
}

std::int64_t Mask::head_at(std::int64_t batch, std::int64_t head) const {
  return (sequences_ == 1 ? 0 : batch * heads_) + (heads_ == 1 ? 0 : head);
}

std::int64_t Mask::seen(std::int64_t batch, std::int64_t head, std::int64_t block) const {
  if (seen_.empty()) return keys_;
  const std::int64_t blocks = blocks_of_queries();
  return seen_[static_cast<std::size_t>(head_at(batch, head) * blocks + (blocks == 1 ? 0 : block))];
}

ScoreMask Mask::rows_at(std::int64_t batch, std::int64_t head, std::int64_t query,
                        std::int64_t key) const {
  if (seen_.empty()) return {};
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(rows_.defined());
  const std::int64_t row = head_at(batch, head) * queries_ + (queries_ == 1 ? 0 : query);
  return {.numbers = rows_.const_data_ptr<float>() + row * keys_ + key,
          .stride = queries_ == 1 ? 0 : static_cast<std::size_t>(keys_)};
}

TransposedScoreMask Mask::columns_at(std::int64_t batch, std::int64_t head, std::int64_t query,
                                     std::int64_t key) const {
  if (seen_.empty()) return {};
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(columns_.defined());
  const std::int64_t columns = columns_.size(3);
  const std::int64_t row = head_at(batch, head) * keys_ + key;
  return {.numbers = columns_.const_data_ptr<float>() + row * columns + (columns == 1 ? 0 : query),
          .stride = static_cast<std::size_t>(columns),
          .is_same_for_queries = columns == 1};
}

}  // namespace semitone::kernels::blocked_attention
