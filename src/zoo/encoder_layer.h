#pragma once

#include "semitone/zoo/encoder.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

namespace semitone::zoo {

// One layer, as torch.nn.TransformerEncoderLayer computes it in training with activation "gelu"
// and norm_first false: unmasked attention, residual, LayerNorm; feed-forward, residual,
// LayerNorm.
class EncoderLayerImpl : public torch::nn::Cloneable<EncoderLayerImpl> {
 public:
  // Error as EncoderImpl's.
  explicit EncoderLayerImpl(const EncoderOptions& options = {});
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

  EncoderOptions options_;
};
TORCH_MODULE(EncoderLayer);

}  // namespace semitone::zoo
