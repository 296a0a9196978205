#pragma once

#include "semitone/zoo/encoder.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <string_view>

// What Encoder and ViT share; Decoder uses the checks.
namespace semitone::zoo {

// The standard deviation of initial weights.
inline constexpr double kInitialDeviation = 0.02;

// Where a layer's LayerNorms are: after the residuals, or before attention and feed-forward.
struct LayerNorms {
  bool first = false;
  double eps = 1e-5;
};

torch::nn::LayerNorm layer_norm(std::int64_t width, double eps);

// Error of the component for a size below 1.
void require_size(std::string_view name, std::int64_t size, std::string_view component);

// Error of the component for tokens that are not (N, length) or not int64.
void require_tokens(const at::Tensor& tokens, std::string_view component);

// Error of the component for layers, width, heads, ffn or dropout that make no sense.
void check_layers(const EncoderOptions& options, std::string_view component);

// One layer, as torch.nn.TransformerEncoderLayer computes it in training with activation "gelu".
// With norm_first false: unmasked attention, residual, LayerNorm; feed-forward, residual,
// LayerNorm.
class EncoderLayerImpl : public torch::nn::Cloneable<EncoderLayerImpl> {
 public:
  // Error as EncoderImpl's.
  explicit EncoderLayerImpl(const EncoderOptions& options = {}, const LayerNorms& norms = {});
  void reset() override;

  // @param rows    (N * length, width): the tokens of all sequences, one after the other
  // @param length  of a sequence
  // @return        a tensor of the shape of rows
  at::Tensor forward(const at::Tensor& rows, std::int64_t length);

  torch::nn::Linear in_proj{nullptr};  // width to queries, keys and values, 3 * width
  torch::nn::Linear out_proj{nullptr};
  torch::nn::Linear linear1{nullptr};  // width to ffn
  torch::nn::Linear linear2{nullptr};  // ffn to width
  torch::nn::LayerNorm norm1{nullptr};
  torch::nn::LayerNorm norm2{nullptr};
  torch::nn::Dropout dropout{nullptr};

 private:
  at::Tensor attend(const at::Tensor& rows, std::int64_t length);

  at::Tensor feed_forward(const at::Tensor& rows);

  EncoderOptions options_;
  LayerNorms norms_;
};
TORCH_MODULE(EncoderLayer);

}  // namespace semitone::zoo
