#include "src/kernels/attention.h"

#include "src/core/native_kernels.h"
#include "src/kernels/attention_blocks.h"
#include "src/kernels/attention_dropout.h"
#include "src/kernels/attention_mask.h"

#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <torch/types.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace semitone::kernels {
namespace blocked_attention {
namespace {

// The forward pass of one thread.
class Forward {
 public:
  Forward(const Shape& shape, const Attention& attention, const Mask& mask, const Heads& query,
          const Heads& key, const Heads& value, const Heads& output, float* max, float* log_sum)
      : shape_(shape),
        attention_(attention),
        mask_(mask),
        query_(query),
        key_(key),
        value_(value),
        output_(output),
        max_of_all_(max),
        log_sum_of_all_(log_sum),
        packed_keys_(memory<Bf16Pair>(padded(shape.keys) * shape.size / 2)),
        packed_values_(memory<Bf16Pair>(padded(shape.keys) * shape.size / 2)),
        queries_(kQueries, shape.size),
        scores_(memory<float>(kQueries * kKeys)),
        probabilities_(memory<Bits>(kQueries * kKeys)),
        sums_(memory<float>(kQueries * shape.size)),
        dropped_(attention.dropout, shape, std::min(kKeys, shape.keys)) {
    // Rows of padding are multiplied too, with whatever they had before; nothing reads the results.
    // Set once, so that no product reads uninitialised memory.
    std::fill_n(probabilities_.get(), kQueries * kKeys, Bits{0});
  }

  // @param unit  a block of queries of a head
  void run(std::int64_t unit) {
    const std::int64_t head = unit / shape_.blocks();
    const std::int64_t batch = head / shape_.heads;
    pack(batch, head % shape_.heads / shape_.group());
    const std::int64_t first = unit % shape_.blocks() * kQueries;
    const std::int64_t count = std::min(kQueries, shape_.queries - first);
    queries_.read(query_.rows(batch, head % shape_.heads, first, count));
    attend(batch, head % shape_.heads, first, count);
    const auto rows = static_cast<std::size_t>(count);
    divide_rows(sums_.get(), rows, static_cast<std::size_t>(shape_.size), sum_.data(),
                output_.at(batch, head % shape_.heads, first),
                static_cast<std::size_t>(output_.stride()));
    const std::int64_t of_first = head * shape_.queries + first;
    // Without a score above -inf, all probabilities are 0.
    for (std::size_t row = 0; row < rows; ++row) {
      const std::int64_t at = of_first + static_cast<std::int64_t>(row);
      max_of_all_[at] = max_[row] == -kInfinity ? 0 : max_[row];
      log_sum_of_all_[at] = sum_[row] == 0 ? kInfinity : std::log(sum_[row]);
    }
  }

 private:
  // Keys and values as right factors, once for all blocks of queries of a head.
  void pack(std::int64_t batch, std::int64_t key_head) {
    const std::int64_t wanted = batch * shape_.key_heads + key_head;
    if (packed_ == wanted) return;
    for (std::int64_t first = 0; first < shape_.keys; first += kKeys) {
      const std::int64_t count = std::min(kKeys, shape_.keys - first);
      const auto rows = static_cast<std::size_t>(padded(count));
      pack_transposed(key_.rows(batch, key_head, first, count), rows,
                      packed_keys_.get() + first * shape_.size / 2);
      pack_rows(value_.rows(batch, key_head, first, count), rows,
                packed_values_.get() + first * shape_.size / 2);
    }
    packed_ = wanted;
  }

  // Sums of exp(…) v over all keys, and their softmax.
  void attend(std::int64_t batch, std::int64_t head, std::int64_t first_query, std::int64_t count) {
    max_.fill(-kInfinity);
    sum_.fill(0);
    // Keys that a query of the block sees.
    std::int64_t seen = mask_.seen(batch, head, first_query / kQueries);
    if (attention_.causal) seen = std::min(seen, first_query + count);
    for (std::int64_t first = 0; first < seen; first += kKeys) {
      const std::int64_t in_block = std::min(kKeys, seen - first);
      const std::int64_t columns = padded(in_block);
      const std::int64_t packed = padded(std::min(kKeys, shape_.keys - first));
      multiply(queries_.left(), {packed_keys_.get() + first * shape_.size / 2, packed, columns},
               shape_.size, scores_.get(), Write::replace);
      const ScoreBlock block{
          .scores = scores_.get(),
          // Not the rows of padding, for which there is no mask.
          .queries = static_cast<std::size_t>(count),
          .keys = static_cast<std::size_t>(columns),
          .scale = static_cast<float>(attention_.scale),
          .seen = attention_.causal ? first_query - first + 1 : in_block,
          .most_seen = static_cast<std::size_t>(in_block),
          .mask = mask_.rows_at(batch, head, first_query, first),
          .dropped = dropped_.at(batch, head, first_query, count, first, in_block)};
      const SoftmaxRows rows{.max = max_.data(),
                             .sum = sum_.data(),
                             .output = first == 0 ? nullptr : sums_.get(),
                             .columns = static_cast<std::size_t>(shape_.size)};
      softmax_block(block, rows, probabilities_.get());
      multiply({probabilities_.get(), columns, queries_.left().rows},
               {packed_values_.get() + first * shape_.size / 2, shape_.size, shape_.size}, columns,
               sums_.get(), first == 0 ? Write::replace : Write::add);
    }
  }

  const Shape& shape_;
  const Attention& attention_;
  const Mask& mask_;
  const Heads& query_;
  const Heads& key_;
  const Heads& value_;
  const Heads& output_;
  float* max_of_all_;
  float* log_sum_of_all_;
  std::int64_t packed_ = -1;
  Memory<Bf16Pair> packed_keys_;    // of each block of keys (D / 2, keys)
  Memory<Bf16Pair> packed_values_;  // of each block (keys / 2, D)
  PaddedRows queries_;
  Memory<float> scores_;
  Memory<Bits> probabilities_;
  Memory<float> sums_;
  DroppedBlock dropped_;
  std::array<float, kQueries> max_{};
  std::array<float, kQueries> sum_{};
};

}  // namespace
}  // namespace blocked_attention

namespace {

bool is_bf16_on_cpu(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided &&
         tensor.scalar_type() == at::kBFloat16 && tensor.dim() == 4 && tensor.numel() > 0;
}

// Whether a mask expands to the scores' shape.
bool is_mask(const at::Tensor& mask, const at::Tensor& query, const at::Tensor& key) {
  const auto dtype = mask.scalar_type();
  return mask.is_cpu() && mask.layout() == at::kStrided &&
         (dtype == at::kBool || dtype == at::kFloat || dtype == query.scalar_type()) &&
         at::is_expandable_to(mask.sizes(),
                              {query.size(0), query.size(1), query.size(2), key.size(2)});
}

// Whether this LibTorch was built with products of blocks. If not, they raise.
bool multiplies_blocks() {
  std::array<blocked_attention::Bits, 256> a{};
  std::array<Bf16Pair, 128> b{};
  std::array<float, 256> c{};
  try {
    const blocked_attention::ReleaseTiles tiles;
    blocked_attention::multiply({a.data(), 16, 16}, {b.data(), 16, 16}, 16, c.data(),
                                blocked_attention::Write::replace);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

bool has_products() {
  if (!has_native_kernel(at::kCPU, at::kBFloat16, OperatorKind::product, Pass::forward) ||
      !at::globalContext().userEnabledMkldnn())
    return false;
  static const bool kMultiplies = multiplies_blocks();
  return kMultiplies;
}

}  // namespace

at::Tensor without_repetitions(const at::Tensor& mask) {
  at::Tensor one = mask;
  for (std::int64_t dim = 0; dim < one.dim(); ++dim) {
    if (one.stride(dim) == 0) one = one.narrow(dim, 0, 1);
  }
  return one;
}

bool has_attention_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const Attention& attention) {
  return is_bf16_on_cpu(query) && is_bf16_on_cpu(key) && is_bf16_on_cpu(value) &&
         query.size(3) % blocked_attention::kMultiple == 0 && key.size(3) == query.size(3) &&
         value.sizes() == key.sizes() && key.size(0) == query.size(0) &&
         query.size(1) % key.size(1) == 0 && attention.scale > 0 &&
         std::isfinite(static_cast<float>(attention.scale)) &&
         (!attention.mask.defined() || is_mask(attention.mask, query, key)) && has_products();
}

AttentionResult attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const Attention& attention) {
  using namespace blocked_attention;  // NOLINT(google-build-using-namespace)
  if (!has_attention_kernel(query, key, value, attention))
    return ref::attention(query, key, value, attention);
  const Shape shape(query, key);
  const at::Tensor max =
      at::empty({shape.batch, shape.heads, shape.queries}, query.options().dtype(at::kFloat));
  const AttentionResult result{empty_like_heads(query), max, at::empty_like(max)};
  const Heads queries(query);
  const Heads keys(key);
  const Heads values(value);
  const Heads output(result.output);
  const Mask mask(attention.mask, shape);
  auto* const maxima = result.max.mutable_data_ptr<float>();
  auto* const log_sums = result.log_sum.mutable_data_ptr<float>();
  parallel_for(
      0, shape.batch * shape.heads * shape.blocks(), 1, [&](std::int64_t begin, std::int64_t end) {
        const ReleaseTiles tiles;
        Forward forward(shape, attention, mask, queries, keys, values, output, maxima, log_sums);
        for (std::int64_t unit = begin; unit < end; ++unit) forward.run(unit);
      });
  return result;
}

}  // namespace semitone::kernels
