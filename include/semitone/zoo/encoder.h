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

/// Shape of an Encoder. The defaults are four of BERT-large's layers and ERNIE's vocabulary:
/// 87,793,232 parameters.
struct EncoderOptions {
  TORCH_ARG(std::int64_t, layers) = 4;
  /// Of a token's vector; a multiple of heads.
  TORCH_ARG(std::int64_t, width) = 1024;
  TORCH_ARG(std::int64_t, heads) = 16;
  /// Of the hidden layer of the feed-forward part.
  TORCH_ARG(std::int64_t, ffn) = 4096;
  /// Probability, from 0 to below 1: after the embeddings, on the attention weights, after each
  /// sublayer and inside of the feed-forward part.
  TORCH_ARG(double, dropout) = 0.1;
  TORCH_ARG(std::int64_t, vocabulary) = 18000;
  /// The longest sequence.
  TORCH_ARG(std::int64_t, max_positions) = 512;
  /// Whether the head multiplies with the token embeddings, transposed, in place of a weight of its
  /// own.
  TORCH_ARG(bool, tied_head) = false;
};

/// One layer: what torch.nn.TransformerEncoderLayer does in training with activation "gelu" and
/// norm_first false. Attention of all tokens to all, residual, LayerNorm; feed forward, residual,
/// LayerNorm.
class EncoderLayerImpl : public torch::nn::Cloneable<EncoderLayerImpl> {
 public:
  /// As EncoderImpl.
  explicit EncoderLayerImpl(const EncoderOptions& options = {});
  void reset() override;

  /// @param rows    (N * length, width): the tokens of all sequences, one after the other
  /// @param length  of a sequence
  /// @return        as rows
  at::Tensor forward(const at::Tensor& rows, std::int64_t length);

  torch::nn::Linear in_proj{nullptr};  ///< width to queries, keys and values, 3 * width
  torch::nn::Linear out_proj{nullptr};
  torch::nn::Linear linear1{nullptr};  ///< width to ffn
  torch::nn::Linear linear2{nullptr};  ///< ffn to width
  torch::nn::LayerNorm norm1{nullptr};
  torch::nn::LayerNorm norm2{nullptr};
  torch::nn::Dropout dropout{nullptr};

 private:
  at::Tensor attend(const at::Tensor& rows, std::int64_t length);

  EncoderOptions options_;
};
TORCH_MODULE(EncoderLayer);

/// The encoder of BERT (Devlin et al. 2018) and ERNIE for masked-language-model training, out of
/// LibTorch's own modules: token and position embeddings, LayerNorm, dropout, layers, and a linear
/// head over the vocabulary. Left out: segment embeddings, the padding mask, the head's hidden
/// layer. Weights start from a normal distribution of standard deviation 0.02, biases from 0, as
/// BERT's.
class EncoderImpl : public torch::nn::Cloneable<EncoderImpl> {
 public:
  /// Error for a size below 1, a width that is no multiple of heads, a dropout outside of [0, 1).
  explicit EncoderImpl(const EncoderOptions& options = {});
  void reset() override;

  /// @param tokens  (N, length), int64, from 0 to vocabulary - 1; length from 1 to max_positions
  /// @return        logits, (N * length, vocabulary): what torch::cross_entropy_loss takes together
  ///                with (N * length) labels
  /// Error for tokens of another shape or dtype, or a longer sequence.
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
