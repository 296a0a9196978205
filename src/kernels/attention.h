#pragma once

#include <ATen/core/Tensor.h>

// Attention of each query over all keys (Vaswani et al. 2017) in blocks that stay in the caches, as
// FlashAttention-2 (Dao 2023) does: softmax(scale * q k^T) v and its gradients, without a matrix of
// all scores in memory. The gradient computes the scores again.
//
// Queries are (N, H, L, D), keys and values (N, K, S, D), where K divides H: head h uses key head
// h / (H / K), which is grouped-query attention (Ainslie et al. 2023) if K < H. The numbers may be
// in any layout. Scores, exponentials and sums are in fp32; probabilities and the scores' gradients
// are rounded to the inputs' dtype before they are multiplied. Results do not depend on the number
// of threads.
namespace semitone::kernels {

struct Attention {
  double scale;         // of the scores
  bool causal = false;  // query i attends to keys 0 to i only
};

struct AttentionResult {
  at::Tensor output;   // as the queries, stored as (N, L, H, D)
  at::Tensor log_sum;  // (N, H, L), fp32: the logarithm of the sum of exp(scale * q . k)
};

struct AttentionGradients {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
};

// Whether there is a kernel for these tensors: bf16 on a CPU with instructions for products in bf16,
// D a multiple of 16, a positive scale, and at least one of everything.
bool has_attention_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const Attention& attention);

AttentionResult attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const Attention& attention);

// @param grad  of the output
AttentionGradients attention_gradients(const at::Tensor& grad, const at::Tensor& query,
                                       const at::Tensor& key, const at::Tensor& value,
                                       const AttentionResult& result, const Attention& attention);

namespace ref {
// The reference implementations, composed of ATen operators in fp32 (fp64 for fp64 inputs).
AttentionResult attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const Attention& attention);
AttentionGradients attention_gradients(const at::Tensor& grad, const at::Tensor& query,
                                       const at::Tensor& key, const at::Tensor& value,
                                       const AttentionResult& result, const Attention& attention);
}  // namespace ref

}  // namespace semitone::kernels
