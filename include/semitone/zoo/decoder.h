#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>

namespace semitone::zoo {

/// Sizes of a Decoder. The defaults are the width and heads of the smallest GPT-2 with four layers:
/// 42,142,464 parameters.
struct DecoderOptions {
  TORCH_ARG(std::int64_t, layers) = 4;
  /// Size of a token's vector; a multiple of heads, and width / heads is even.
  TORCH_ARG(std::int64_t, width) = 768;
  TORCH_ARG(std::int64_t, heads) = 12;
  /// Heads of keys and values, a divisor of heads: each serves heads / kv_heads heads of queries
  /// (grouped queries, Ainslie et al. 2023). Default: as many as heads.
  TORCH_ARG(std::optional<std::int64_t>, kv_heads);
  /// Width of the hidden layer of the feed-forward part. As in Llama, the default is 8/3 of the
  /// default width.
  TORCH_ARG(std::int64_t, ffn) = 2048;
  TORCH_ARG(std::int64_t, vocabulary) = 18000;
  /// Base of the rotary positions' wavelengths, above 0.
  TORCH_ARG(double, rope_theta) = 10000;
  /// Whether the head multiplies by the transposed token embeddings instead of a weight of its own.
  TORCH_ARG(bool, tied_head) = true;
  /// Whether only the inputs of layers are kept for the backward pass, which runs the layers again
  /// (nn::checkpoint).
  TORCH_ARG(bool, checkpoint_layers) = false;
};

/// A GPT with the architecture of Llama (Touvron et al. 2023), built from LibTorch's own modules
/// and operators: token embeddings, layers, a last RMS norm (eps 1e-5), and a linear head over the
/// vocabulary. A layer adds causal attention, and then a SwiGLU feed-forward part (Shazeer 2020), to
/// its input, each after an RMS norm. Queries and keys have rotary positions (Su et al. 2021), in
/// which component i of a head and component i + size / 2 are a pair, as in GPT-NeoX. There are no
/// biases and no dropout. As in GPT-2, weights are initialised from a normal distribution with
/// standard deviation 0.02; those of the norms are 1.
class DecoderImpl : public torch::nn::Cloneable<DecoderImpl> {
 public:
  /// Error for a size below 1, a width that is not a multiple of heads, an odd width / heads, heads
  /// that are not a multiple of kv_heads, or a rope_theta that is not a finite number above 0.
  explicit DecoderImpl(const DecoderOptions& options = {});
  void reset() override;

  /// @param tokens  (N, length), int64, from 0 to vocabulary - 1; length of at least 1. Rotary
  ///                positions set no limit to the length.
  /// @return        logits, (N * length, vocabulary), of the token that follows each token; for
  ///                torch::cross_entropy_loss with (N * length) labels
  /// Error for tokens of another shape or dtype.
  at::Tensor forward(const at::Tensor& tokens);

  const DecoderOptions& options() const { return options_; }

  torch::nn::Embedding token_embedding{nullptr};
  torch::nn::ModuleList layers{nullptr};
  at::Tensor norm;                  ///< (width), the weight of the last RMS norm
  torch::nn::Linear head{nullptr};  ///< empty with tied_head

 private:
  DecoderOptions options_;
};
TORCH_MODULE(Decoder);

}  // namespace semitone::zoo
