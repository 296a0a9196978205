#include "src/kernels/attention_dropout.h"

#include "src/kernels/dropout_kernel.h"

#include <algorithm>
#include <cstddef>

namespace semitone::kernels::blocked_attention {
namespace {

constexpr auto kGroup = static_cast<std::int64_t>(kDropoutGroup);
constexpr std::int64_t kBits = 32;  // in a word
static_assert(kKeys % kGroup == 0 && kKeysBackward % kGroup == 0);

std::int64_t groups_of(std::int64_t keys) {
  return (keys + kGroup - 1) / kGroup;
}

}  // namespace

DroppedBlock::DroppedBlock(const std::optional<Dropout>& dropout, const Shape& shape,
                           std::int64_t keys)
    : dropout_(dropout),
      shape_(shape),
      scale_(dropout.has_value() ? static_cast<float>(dropout->scale()) : 1) {
  if (!dropout.has_value()) return;
  const std::int64_t size = groups_of(keys) * kGroup / kBits * kQueries;
  bits_ = memory<std::uint32_t>(size);
  std::fill_n(bits_.get(), size, 0U);
}

DroppedScores DroppedBlock::at(std::int64_t batch, std::int64_t head, std::int64_t query,
                               std::int64_t queries, std::int64_t key, std::int64_t keys) {
  if (!dropout_.has_value()) return {};
  const auto per_query = static_cast<std::uint64_t>(groups_of(shape_.keys));
  const auto row =
      static_cast<std::uint64_t>((batch * shape_.heads + head) * shape_.queries + query);
  dropped_bits({.stream = dropout_->stream(),
                .threshold = dropout_->threshold(),
                .first = row * per_query + static_cast<std::uint64_t>(key / kGroup),
                .from_row_to_row = per_query,
                .rows = static_cast<std::size_t>(queries),
                .groups = static_cast<std::size_t>(groups_of(keys))},
               bits_.get(), static_cast<std::size_t>(kQueries));
  return {.bits = bits_.get(), .stride = static_cast<std::size_t>(kQueries), .scale = scale_};
}

}  // namespace semitone::kernels::blocked_attention
