#include "src/kernels/attention.h"

#include "src/kernels/ref/wide.h"

#include <torch/types.h>

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

}  // namespace

AttentionResult attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const Attention& attention) {
  const at::Tensor scores = scores_of(query, for_heads(key, query), attention);
  const at::Tensor probabilities = at::_safe_softmax(scores, -1);
  const at::Tensor log_sum = scores.logsumexp(-1);
  return {probabilities.matmul(for_heads(value, query)).to(query.scalar_type()),
          log_sum.masked_fill(log_sum.isneginf(), std::numeric_limits<double>::infinity())};
}

AttentionGradients attention_gradients(const at::Tensor& grad, const at::Tensor& query,
                                       const at::Tensor& key, const at::Tensor& value,
                                       const AttentionResult& result, const Attention& attention) {
  const at::Tensor keys = for_heads(key, query);
  const at::Tensor values = for_heads(value, query);
  const at::Tensor grads = wide(grad);
  const at::Tensor probabilities =
      scores_of(query, keys, attention).sub(result.log_sum.unsqueeze(-1)).exp();
  const at::Tensor delta = grads.mul(wide(result.output)).sum(-1, /*keepdim=*/true);
  const at::Tensor of_scores =
      grads.matmul(values.transpose(-2, -1)).sub(delta).mul(probabilities).mul(attention.scale);
  return {of_scores.matmul(keys).to(query.scalar_type()),
          of_key_heads(of_scores.transpose(-2, -1).matmul(wide(query)), key),
          of_key_heads(probabilities.transpose(-2, -1).matmul(grads), value)};
}

}  // namespace semitone::kernels::ref
