#pragma once

#include "src/kernels/dropout.h"

#include <ATen/core/Tensor.h>

#include <optional>

// Attention of each query over all keys (Vaswani et al. 2017) in blocks that stay in the caches, as
// FlashAttention-2 (Dao 2023) does: softmax(scale * q k^T + mask) v and its gradients, without a
// matrix of all scores in memory. The gradient computes the scores again.
//
// Queries are (N, H, L, D), keys and values (N, K, S, D), where K divides H: head h uses key head
// h / (H / K), which is grouped-query attention (Ainslie et al. 2023) if K < H. The numbers may be
// in any layout. Scores, exponentials and sums are in fp32; probabilities and the scores' gradients
// are rounded to the inputs' dtype before they are multiplied. Results do not depend on the number
// of threads. oneDNN compiles a product at the first call with its sizes in each thread, which are
// multiples of 16.
namespace semitone::kernels {

struct Attention {
  double scale;         // of the scores
  bool causal = false;  // query i attends to keys 0 to i only
  // Which keys a query attends to (bool), or numbers that are added to the scaled scores (fp32, or
  // the queries' dtype); of a shape that expands to (N, H, L, S). Undefined: none.
  at::Tensor mask = {};
  // Dropout of the probabilities. That of query i and key j uses the random number of element j % 128
  // in group i * G + j / 128 of the stream, where i counts the queries of all heads and sequences,
  // and G is the number of groups that hold S elements.
  std::optional<Dropout> dropout = {};
};

struct AttentionResult {
  at::Tensor output;  // as the queries, stored as (N, L, H, D)
  // (N, H, L), fp32: the largest score, scale * q . k + mask, and the logarithm of the sum of
  // exp(score - max). Not added: a mask of -1e9 in front of all keys would leave nothing of the
  // logarithm. Without a score above -inf they are 0 and inf, and the output is 0.
  at::Tensor max;
  at::Tensor log_sum;
};

struct AttentionGradients {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
};

// The gradients to compute.
struct AttentionWanted {
  bool query = true;
  bool key = true;
  bool value = true;
};

// Returns the mask with size 1 in the dimensions in which expand() has repeated it.
at::Tensor without_repetitions(const at::Tensor& mask);

// Whether a kernel supports these tensors: bf16 on a CPU with instructions for products in bf16,
// which oneDNN may use; D a multiple of 16; values of the keys' shape; at least one element; a
// positive scale, finite in fp32; no mask, or one as in Attention, on the CPU.
bool has_attention_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const Attention& attention);

// Without a kernel these two compute the reference. A mask is made a matrix of fp32 numbers first, as
// large as the mask is without repetitions; the gradient transposes it, with two of them for a while.
AttentionResult attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const Attention& attention);

// Each thread has fp32 sums for the keys and values of a head, and up to 64 MiB of them are shared.
//
// @param grad  of the output
// @return      undefined where not wanted
AttentionGradients attention_gradients(const at::Tensor& grad, const at::Tensor& query,
                                       const at::Tensor& key, const at::Tensor& value,
                                       const AttentionResult& result, const Attention& attention,
                                       const AttentionWanted& wanted = {});

namespace ref {
// 0 or the dropout's scale for each probability, (N, H, L, S), fp64.
at::Tensor attention_dropout(const Dropout& dropout, const at::Tensor& query,
                             const at::Tensor& key);

// The reference implementations, composed of ATen operators in fp32 (fp64 for fp64 inputs).
AttentionResult attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const Attention& attention);
AttentionGradients attention_gradients(const at::Tensor& grad, const at::Tensor& query,
                                       const at::Tensor& key, const at::Tensor& value,
                                       const AttentionResult& result, const Attention& attention);
}  // namespace ref

}  // namespace semitone::kernels
