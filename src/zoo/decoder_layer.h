#pragma once

#include "semitone/zoo/decoder.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

// The parts of Decoder.
namespace semitone::zoo {

// Cosines and sines of the angles by which the components of a head turn at each position, both
// (length, size). A pair of components has the same angle, position * theta^(-2 * i / size) for
// pair i.
struct RotaryPositions {
  at::Tensor cos;
  at::Tensor sin;
};

// @param like  the angles are computed on its device, in fp32, or in fp64 if that is its dtype
RotaryPositions rotary_positions(std::int64_t length, std::int64_t size, double theta,
                                 const at::Tensor& like);

// Turns each head by its position.
// @param heads  (…, length, size)
// @return       a tensor of the shape and dtype of heads
at::Tensor rotate(const at::Tensor& heads, const RotaryPositions& positions);

// One layer: causal attention, and then the feed-forward part, each after an RMS norm and added to
// its input.
class DecoderLayerImpl : public torch::nn::Cloneable<DecoderLayerImpl> {
 public:
  // Error as DecoderImpl's.
  explicit DecoderLayerImpl(const DecoderOptions& options = {});
  void reset() override;

  // @param rows       (N * length, width): the tokens of all sequences, one after the other
  // @param positions  of a sequence
  // @return           a tensor of the shape of rows
  at::Tensor forward(const at::Tensor& rows, const RotaryPositions& positions);

  // SwiGLU: down_proj(silu(gate_proj(rows)) * up_proj(rows)).
  at::Tensor feed_forward(const at::Tensor& rows);

  torch::nn::Linear q_proj{nullptr};     // width to width
  torch::nn::Linear k_proj{nullptr};     // width to kv_heads * width / heads
  torch::nn::Linear v_proj{nullptr};     // as k_proj
  torch::nn::Linear o_proj{nullptr};     // width to width
  torch::nn::Linear gate_proj{nullptr};  // width to ffn
  torch::nn::Linear up_proj{nullptr};    // width to ffn
  torch::nn::Linear down_proj{nullptr};  // ffn to width
  at::Tensor norm1;                      // (width), the weight of the RMS norm before attention
  at::Tensor norm2;                      // (width), of the one before the feed-forward part

 private:
  at::Tensor attend(const at::Tensor& rows, const RotaryPositions& positions);

  DecoderOptions options_;
};
TORCH_MODULE(DecoderLayer);

}  // namespace semitone::zoo
