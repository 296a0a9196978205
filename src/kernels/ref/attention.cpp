#include "src/kernels/attention.h"

#include "src/kernels/dropout_kernel.h"
#include "src/kernels/ref/wide.h"

#include <torch/types.h>

#include <cstdint>
#include <limits>

namespace semitone::kernels::ref {
namespace {

// Keys or values for each head of the queries.
at::Tensor for_heads(const at::Tensor& tensor, const at::Tensor& query) {
  return wide(tensor).repeat_interleave(query.size(1) / tensor.size(1), 1);
}

// The gradient of what for_heads made.
at::Tensor of_key_heads(const at::Tensor& grad, const at::Tensor& like) {
  const auto groups = grad.size(1) / like.size(1);
  return grad.unflatten(1, {like.size(1), groups}).sum(2).to(like.scalar_type());
}

at::Tensor scores_of(const at::Tensor& query, const at::Tensor& keys, const Attention& attention) {
  at::Tensor scores = wide(query).matmul(keys.transpose(-2, -1)).mul(attention.scale);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor& mask = attention.mask;
  if (mask.defined()) {
    scores = mask.scalar_type() == at::kBool ? scores.masked_fill(mask.logical_not(), -kInfinity)
                                             : scores.add(wide(mask));
  }
  if (!attention.causal) return scores;
  const at::Tensor hidden = torch::ones({query.size(2), keys.size(2)}, torch::kBool).triu(1);
  return scores.masked_fill(hidden, -kInfinity);
}

// Probabilities, or their gradients, with 0 for those that are dropped.
at::Tensor dropped(const at::Tensor& values, const at::Tensor& query, const at::Tensor& key,
                   const Attention& attention) {
  if (!attention.dropout.has_value()) return values;
  return values.mul(attention_dropout(*attention.dropout, query, key).to(values.scalar_type()));
}

}  // namespace

at::Tensor attention_dropout(const Dropout& dropout, const at::Tensor& query,
                             const at::Tensor& key) {
  const std::int64_t queries = query.size(0) * query.size(1) * query.size(2);
  constexpr auto kGroup = static_cast<std::int64_t>(kDropoutGroup);
  const std::int64_t groups = (key.size(2) + kGroup - 1) / kGroup;
  const at::Tensor factors = at::empty({queries, groups * kGroup}, at::kDouble);
  auto* to = factors.mutable_data_ptr<double>();
  for (std::int64_t group = 0; group < queries * groups; ++group) {
    for (const auto number : dropout_numbers(dropout.stream(), static_cast<std::uint64_t>(group)))
      *to++ = number < dropout.threshold() ? 0 : dropout.scale();
  }
  return factors.slice(1, 0, key.size(2))
      .reshape({query.size(0), query.size(1), query.size(2), key.size(2)});
}

AttentionResult attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const Attention& attention) {
  const at::Tensor scores = scores_of(query, for_heads(key, query), attention);
  const at::Tensor probabilities = at::_safe_softmax(scores, -1);
  const at::Tensor largest = scores.amax(-1);
  const at::Tensor max = largest.masked_fill(largest.isneginf(), 0);
  const at::Tensor log_sum = scores.sub(max.unsqueeze(-1)).logsumexp(-1);
  return {dropped(probabilities, query, key, attention)
              .matmul(for_heads(value, query))
              .to(query.scalar_type()),
          max, log_sum.masked_fill(log_sum.isneginf(), std::numeric_limits<double>::infinity())};
}

AttentionGradients attention_gradients(const at::Tensor& grad, const at::Tensor& query,
                                       const at::Tensor& key, const at::Tensor& value,
                                       const AttentionResult& result, const Attention& attention) {
  const at::Tensor keys = for_heads(key, query);
  const at::Tensor values = for_heads(value, query);
  const at::Tensor grads = wide(grad);
  const at::Tensor probabilities = scores_of(query, keys, attention)
                                       .sub(result.max.unsqueeze(-1))
                                       .sub(result.log_sum.unsqueeze(-1))
                                       .exp();
  const at::Tensor delta = grads.mul(wide(result.output)).sum(-1, /*keepdim=*/true);
  const at::Tensor of_probabilities =
      dropped(grads.matmul(values.transpose(-2, -1)), query, key, attention);
  const at::Tensor of_scores = of_probabilities.sub(delta).mul(probabilities).mul(attention.scale);
  return {
      of_scores.matmul(keys).to(query.scalar_type()),
      of_key_heads(of_scores.transpose(-2, -1).matmul(wide(query)), key),
      of_key_heads(dropped(probabilities, query, key, attention).transpose(-2, -1).matmul(grads),
                   value)};
}

}  // namespace semitone::kernels::ref
