#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

namespace semitone::zoo {

/// Sizes of an Encoder. The defaults are BERT-large's layer sizes with four layers, and the size of
/// ERNIE's vocabulary: 87,793,232 parameters.
struct EncoderOptions {
  TORCH_ARG(std::int64_t, layers) = 4;
  /// Size of a token's vector; a multiple of heads.
  TORCH_ARG(std::int64_t, width) = 1024;
  TORCH_ARG(std::int64_t, heads) = 16;
  /// Width of the hidden layer of the feed-forward part.
  TORCH_ARG(std::int64_t, ffn) = 4096;
  /// Dropout probability, from 0 to below 1. It applies after the embeddings, to the attention
  /// weights, after each sublayer and inside the feed-forward part.
  TORCH_ARG(double, dropout) = 0.1;
  TORCH_ARG(std::int64_t, vocabulary) = 18000;
  /// Largest length of a sequence.
  TORCH_ARG(std::int64_t, max_positions) = 512;
  /// Whether the head multiplies by the transposed token embeddings instead of a weight of its own.
  TORCH_ARG(bool, tied_head) = false;
  /// Whether only the inputs of layers are kept for the backward pass, which runs the layers again
  /// (nn::checkpoint).
  TORCH_ARG(bool, checkpoint_layers) = false;
};

/// The encoder of BERT (Devlin et al. 2018) and ERNIE for masked-language-model training, built
/// from LibTorch's own modules: token and position embeddings, LayerNorm, dropout, layers, and a
/// linear head over the vocabulary. It has no segment embeddings, padding mask or hidden layer in
/// the head. As in BERT, weights are initialised from a normal distribution with standard deviation
/// 0.02, and biases to 0.
class EncoderImpl : public torch::nn::Cloneable<EncoderImpl> {
 public:
  /// Error for a size below 1, a width that is not a multiple of heads, or a dropout outside [0,
  /// 1).
  explicit EncoderImpl(const EncoderOptions& options = {});
  void reset() override;

  /// @param tokens  (N, length), int64, from 0 to vocabulary - 1; length from 1 to max_positions
  /// @return        logits, (N * length, vocabulary), for torch::cross_entropy_loss with (N *
  ///                length) labels
  /// Error for tokens of another shape or dtype, or for a longer sequence.
  at::Tensor forward(const at::Tensor& tokens);

  const EncoderOptions& options() const { return options_; }

  torch::nn::Embedding token_embedding{nullptr};
  torch::nn::Embedding position_embedding{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Dropout dropout{nullptr};
  torch::nn::ModuleList layers{nullptr};
  torch::nn::Linear head{nullptr};  ///< empty with tied_head
  at::Tensor head_bias;             ///< with tied_head

 private:
  EncoderOptions options_;
};
TORCH_MODULE(Encoder);

}  // namespace semitone::zoo
