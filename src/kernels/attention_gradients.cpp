#include "src/kernels/attention.h"
#include "src/kernels/attention_blocks.h"
#include "src/kernels/attention_dropout.h"
#include "src/kernels/attention_mask.h"

#include <torch/types.h>

#include <array>

namespace semitone::kernels {
namespace blocked_attention {
namespace {

// The backward pass of one thread: for each block of queries and each block of keys, the scores
// again, as keys x queries, so that all five products read their factors as they are stored.
class Backward {
 public:
  struct Inputs {
    Heads grad;
    Heads query;
    Heads key;
    Heads value;
    Heads output;
    const float* max;
    const float* log_sum;
  };

  Backward(const Shape& shape, const Attention& attention, const Mask& mask,
           const AttentionWanted& wanted, const Inputs& inputs, const Heads& query_gradient)
      : shape_(shape),
        attention_(attention),
        mask_(mask),
        wanted_(wanted),
        in_(inputs),
        query_gradient_(query_gradient),
        transposed_keys_(memory<Bits>(shape.size * padded(shape.keys))),
        keys_(kKeysBackward, shape.size),
        values_(kKeysBackward, shape.size),
        query_columns_(memory<Bf16Pair>(kQueries * shape.size / 2)),
        query_rows_(memory<Bf16Pair>(kQueries * shape.size / 2)),
        grad_columns_(memory<Bf16Pair>(kQueries * shape.size / 2)),
        grad_rows_(memory<Bf16Pair>(kQueries * shape.size / 2)),
        scores_(memory<float>(kQueries * kKeysBackward)),
        grads_(memory<float>(kQueries * kKeysBackward)),
        probabilities_(memory<Bits>(kQueries * kKeysBackward)),
        score_rows_(memory<Bits>(kQueries * kKeysBackward)),
        score_pairs_(memory<Bf16Pair>(kQueries * kKeysBackward / 2)),
        query_sums_(memory<float>(kQueries * shape.size)),
        dropped_(attention.dropout, shape, kKeysBackward) {}

  // Adds the gradients of the keys and values of a head, (keys, D) each, from every parts-th of its
  // group's blocks of queries, and writes the gradients of these queries. Parts of a causal mask
  // are thus alike.
  void run(std::int64_t batch, std::int64_t key_head, std::int64_t part, std::int64_t parts,
           float* key_sums, float* value_sums) {
    if (wanted_.query) read_keys(batch, key_head);
    for (std::int64_t unit = part; unit < shape_.group() * shape_.blocks(); unit += parts) {
      const std::int64_t head = key_head * shape_.group() + unit / shape_.blocks();
      const std::int64_t query = unit % shape_.blocks() * kQueries;
      read_queries(batch, head, query);
      std::int64_t seen = mask_.seen(batch, head, unit % shape_.blocks());
      if (attention_.causal) seen = std::min(seen, query + count_);
      for (std::int64_t key = 0; key < seen; key += kKeysBackward) {
        const std::int64_t keys = std::min(kKeysBackward, seen - key);
        add_block(batch, head, query, key, keys, key_sums + key * shape_.size,
                  value_sums + key * shape_.size);
      }
      if (!wanted_.query) continue;
      round_transposed(query_sums_.get(), static_cast<std::size_t>(columns_),
                       static_cast<std::size_t>(count_), static_cast<std::size_t>(shape_.size),
                       query_gradient_.at(batch, head, query),
                       static_cast<std::size_t>(query_gradient_.stride()));
    }
  }

 private:
  // Each block of keys as a left factor, (D, keys), for the gradients of queries.
  void read_keys(std::int64_t batch, std::int64_t key_head) {
    for (std::int64_t first = 0; first < shape_.keys; first += kKeysBackward) {
      const std::int64_t count = std::min(kKeysBackward, shape_.keys - first);
      transpose(in_.key.rows(batch, key_head, first, count),
                static_cast<std::size_t>(padded(count)),
                transposed_keys_.get() + first * shape_.size);
    }
  }

  void read_queries(std::int64_t batch, std::int64_t head, std::int64_t first) {
    count_ = std::min(kQueries, shape_.queries - first);
    columns_ = padded(count_);
    const auto rows = static_cast<std::size_t>(columns_);
    const Bf16Matrix query = in_.query.rows(batch, head, first, count_);
    const Bf16Matrix grad = in_.grad.rows(batch, head, first, count_);
    pack_transposed(query, rows, query_columns_.get());
    pack_rows(query, rows, query_rows_.get());
    pack_transposed(grad, rows, grad_columns_.get());
    pack_rows(grad, rows, grad_rows_.get());
    delta_.fill(0);
    dot_rows(grad, in_.output.rows(batch, head, first, count_), delta_.data());
    max_.fill(0);
    log_sum_.fill(kInfinity);
    const std::int64_t of_first = (batch * shape_.heads + head) * shape_.queries + first;
    std::copy_n(in_.max + of_first, count_, max_.begin());
    std::copy_n(in_.log_sum + of_first, count_, log_sum_.begin());
  }

  void add_block(std::int64_t batch, std::int64_t head, std::int64_t query, std::int64_t key,
                 std::int64_t keys, float* key_sums, float* value_sums) {
    const std::int64_t size = shape_.size;
    const std::int64_t key_head = head / shape_.group();
    const Left& key_rows = keys_.read(in_.key.rows(batch, key_head, key, keys));
    const std::int64_t rows = key_rows.rows;
    multiply(key_rows, {query_columns_.get(), columns_, columns_}, size, scores_.get(),
             Write::replace);
    const auto scale = static_cast<float>(attention_.scale);
    transposed_softmax({.scores = scores_.get(),
                        .keys = static_cast<std::size_t>(keys),
                        .padded_keys = static_cast<std::size_t>(rows),
                        .queries = static_cast<std::size_t>(columns_),
                        .scale = scale,
                        .max = max_.data(),
                        .log_sum = log_sum_.data(),
                        .skipped = attention_.causal ? key - query : -shape_.keys,
                        .mask = mask_.columns_at(batch, head, query, key),
                        .dropped = dropped_.at(batch, head, query, count_, key, keys)},
                       probabilities_.get());
    if (wanted_.value) {
      multiply({probabilities_.get(), columns_, rows}, {grad_rows_.get(), size, size}, columns_,
               value_sums, Write::add);
    }
    if (!wanted_.query && !wanted_.key) return;
    multiply(values_.read(in_.value.rows(batch, key_head, key, keys)),
             {grad_columns_.get(), columns_, columns_}, size, grads_.get(), Write::replace);
    score_gradients({.probabilities = scores_.get(),
                     .grad = grads_.get(),
                     .delta = delta_.data(),
                     .padded_keys = static_cast<std::size_t>(rows),
                     .queries = static_cast<std::size_t>(columns_),
                     .scale = scale,
                     .kept_scale = dropped_.scale()},
                    score_rows_.get(), score_pairs_.get());
    if (wanted_.key) {
      multiply({score_rows_.get(), columns_, rows}, {query_rows_.get(), size, size}, columns_,
               key_sums, Write::add);
    }
    if (!wanted_.query) return;
    const std::int64_t packed = padded(std::min(kKeysBackward, shape_.keys - key));
    multiply({transposed_keys_.get() + key * size, packed, size},
             {score_pairs_.get(), columns_, columns_}, rows, query_sums_.get(),
             key == 0 ? Write::replace : Write::add);
  }

  const Shape& shape_;
  const Attention& attention_;
  const Mask& mask_;
  const AttentionWanted& wanted_;
  const Inputs& in_;
  const Heads& query_gradient_;
  Memory<Bits> transposed_keys_;  // of each block of keys (D, keys)
  PaddedRows keys_;
  PaddedRows values_;
  // The block of queries, and of the output's gradient, as right factors: (D / 2, queries) and
  // (queries / 2, D).
  Memory<Bf16Pair> query_columns_;
  Memory<Bf16Pair> query_rows_;
  Memory<Bf16Pair> grad_columns_;
  Memory<Bf16Pair> grad_rows_;
  std::int64_t count_ = 0;    // of queries in the block
  std::int64_t columns_ = 0;  // padded
  std::array<float, kQueries> delta_{};
  std::array<float, kQueries> max_{};
  std::array<float, kQueries> log_sum_{};
  Memory<float> scores_;  // (keys, queries), as all of these
  Memory<float> grads_;
  Memory<Bits> probabilities_;
  Memory<Bits> score_rows_;
  Memory<Bf16Pair> score_pairs_;
  Memory<float> query_sums_;  // (D, queries)
  DroppedBlock dropped_;
};

// The blocks of queries of a key head are divided into parts for threads, each with sums of its
// own: as many that there are at least 32 parts, if there are as many blocks, and if all sums take
// at most 64 MiB. Independent of the number of threads.
std::int64_t parts_of(const Shape& shape) {
  constexpr std::int64_t kLeastParts = 32;
  constexpr std::int64_t kMostElements = 64 * 1024 * 1024 / sizeof(float);
  const std::int64_t heads = shape.batch * shape.key_heads;
  const std::int64_t elements = 2 * padded(shape.keys) * shape.size;
  const std::int64_t affordable = kMostElements / (heads * elements);
  const std::int64_t most = std::min(shape.group() * shape.blocks(), affordable);
  return std::clamp((kLeastParts + heads - 1) / heads, std::int64_t{1},
                    std::max<std::int64_t>(1, most));
}

}  // namespace
}  // namespace blocked_attention

AttentionGradients attention_gradients(const at::Tensor& grad, const at::Tensor& query,
                                       const at::Tensor& key, const at::Tensor& value,
                                       const AttentionResult& result, const Attention& attention,
                                       const AttentionWanted& wanted) {
  using namespace blocked_attention;  // NOLINT(google-build-using-namespace)
  const auto only_wanted = [&](AttentionGradients gradients) {
    if (!wanted.query) gradients.query.reset();
    if (!wanted.key) gradients.key.reset();
    if (!wanted.value) gradients.value.reset();
    return gradients;
  };
  if (!has_attention_kernel(query, key, value, attention))
    return only_wanted(ref::attention_gradients(grad, query, key, value, result, attention));
  const Shape shape(query, key);
  const AttentionGradients gradients{empty_like_heads(query), empty_like_heads(key),
                                     empty_like_heads(value)};
  const at::Tensor max = result.max.contiguous();
  const at::Tensor log_sums = result.log_sum.contiguous();
  const Backward::Inputs inputs{.grad = Heads(grad),
                                .query = Heads(query),
                                .key = Heads(key),
                                .value = Heads(value),
                                .output = Heads(result.output),
                                .max = max.const_data_ptr<float>(),
                                .log_sum = log_sums.const_data_ptr<float>()};
  const Heads query_gradient(gradients.query);
  const Heads key_gradient(gradients.key);
  const Heads value_gradient(gradients.value);

  Mask mask(attention.mask, shape);
  mask.transpose();
  const std::int64_t parts = parts_of(shape);
  const std::int64_t heads = shape.batch * shape.key_heads;
  const std::int64_t elements = padded(shape.keys) * shape.size;
  // A part's sums of keys, then those of values.
  const auto sums = memory<float>((parts == 1 ? 0 : heads * parts) * 2 * elements);
  const auto finish = [&](std::int64_t head, const float* of_head) {
    const auto rows = static_cast<std::size_t>(shape.keys);
    const auto columns = static_cast<std::size_t>(shape.size);
    const std::int64_t batch = head / shape.key_heads;
    const std::int64_t key_head = head % shape.key_heads;
    if (wanted.key) {
      round_rows(of_head, rows, columns, key_gradient.at(batch, key_head, 0),
                 static_cast<std::size_t>(key_gradient.stride()));
    }
    if (wanted.value) {
      round_rows(of_head + elements, rows, columns, value_gradient.at(batch, key_head, 0),
                 static_cast<std::size_t>(value_gradient.stride()));
    }
  };
  parallel_for(0, heads * parts, 1, [&](std::int64_t begin, std::int64_t end) {
    const ReleaseTiles tiles;
    Backward backward(shape, attention, mask, wanted, inputs, query_gradient);
    const auto own = memory<float>(parts == 1 ? 2 * elements : 0);
    for (std::int64_t unit = begin; unit < end; ++unit) {
      float* const of_part = parts == 1 ? own.get() : sums.get() + unit * 2 * elements;
      std::fill_n(of_part, 2 * elements, 0.0F);
      const std::int64_t head = unit / parts;
      const std::int64_t part = unit % parts;
      backward.run(head / shape.key_heads, head % shape.key_heads, part, parts, of_part,
                   of_part + elements);
      if (parts == 1) finish(head, of_part);
    }
  });
  if (parts > 1) {
    parallel_for(0, heads, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t head = begin; head < end; ++head) {
        float* const of_head = sums.get() + head * parts * 2 * elements;
        for (std::int64_t part = 1; part < parts; ++part) {
          const float* const of_part = of_head + part * 2 * elements;
          for (std::int64_t i = 0; i < 2 * elements; ++i) of_head[i] += of_part[i];
        }
        finish(head, of_head);
      }
    });
  }
  return only_wanted(gradients);
}

}  // namespace semitone::kernels
