#include "src/kernels/attention_mask.h"

#include "src/core/parallel_for.h"

#include <torch/types.h>

#include <algorithm>
#include <cstddef>
#include <iterator>

namespace semitone::kernels::blocked_attention {
namespace {

// (N or 1, H or 1, L or 1, S) in fp32.
at::Tensor numbers_of(const at::Tensor& mask, std::int64_t keys) {
  at::Tensor wide = mask;
  while (wide.dim() < 4) wide = wide.unsqueeze(0);
  for (std::int64_t dim = 0; dim < 3; ++dim) {
    if (wide.stride(dim) == 0) wide = wide.narrow(dim, 0, 1);  // was expanded
  }
  wide = wide.expand({-1, -1, -1, keys});
  if (wide.scalar_type() != at::kBool) return wide.resolve_neg().to(at::kFloat).contiguous();
  return at::zeros(wide.sizes(), wide.options().dtype(at::kFloat))
      .masked_fill_(wide.logical_not(), -kInfinity);
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
  find_seen();
}

void Mask::find_seen() {
  const std::int64_t rows = rows_.size(2);
  const std::int64_t blocks = (rows + kQueries - 1) / kQueries;
  seen_.resize(static_cast<std::size_t>(rows_.size(0) * rows_.size(1) * blocks));
  const auto* const numbers = rows_.const_data_ptr<float>();
  parallel_for(0, std::ssize(seen_), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t first = i % blocks * kQueries;
      const float* const block = numbers + (i / blocks * rows + first) * keys_;
      std::int64_t seen = 1;
      for (std::int64_t row = 0; row < std::min(kQueries, rows - first); ++row)
        seen = seen_keys(block + row * keys_, keys_, seen);
      seen_[static_cast<std::size_t>(i)] = seen;
    }
  });
}

void Mask::transpose() {
  if (!rows_.defined()) return;
  const std::int64_t rows = rows_.size(2);
  if (rows == 1) {
    columns_ = rows_.transpose(2, 3).contiguous();
    return;
  }
  columns_ = at::zeros({rows_.size(0), rows_.size(1), keys_, padded(rows)}, rows_.options());
  columns_.narrow(3, 0, rows).copy_(rows_.transpose(2, 3));
}

std::int64_t Mask::head_at(std::int64_t batch, std::int64_t head) const {
  const std::int64_t heads = rows_.size(1);
  return (rows_.size(0) == 1 ? 0 : batch * heads) + (heads == 1 ? 0 : head);
}

std::int64_t Mask::seen(std::int64_t batch, std::int64_t head, std::int64_t block) const {
  if (!rows_.defined()) return keys_;
  const std::int64_t blocks = (rows_.size(2) + kQueries - 1) / kQueries;
  return seen_[static_cast<std::size_t>(head_at(batch, head) * blocks + (blocks == 1 ? 0 : block))];
}

ScoreMask Mask::rows_at(std::int64_t batch, std::int64_t head, std::int64_t query,
                        std::int64_t key) const {
  if (!rows_.defined()) return {};
  const std::int64_t rows = rows_.size(2);
  const std::int64_t row = head_at(batch, head) * rows + (rows == 1 ? 0 : query);
  return {.numbers = rows_.const_data_ptr<float>() + row * keys_ + key,
          .stride = rows == 1 ? 0 : static_cast<std::size_t>(keys_)};
}

TransposedScoreMask Mask::columns_at(std::int64_t batch, std::int64_t head, std::int64_t query,
                                     std::int64_t key) const {
  if (!rows_.defined()) return {};
  const std::int64_t columns = columns_.size(3);
  const std::int64_t row = head_at(batch, head) * keys_ + key;
  return {.numbers = columns_.const_data_ptr<float>() + row * columns + (columns == 1 ? 0 : query),
          .stride = static_cast<std::size_t>(columns),
          .is_same_for_queries = columns == 1};
}

}  // namespace semitone::kernels::blocked_attention
