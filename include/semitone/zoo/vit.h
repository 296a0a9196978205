#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

namespace semitone::zoo {

/// Sizes of a ViT. The defaults are those of ViT-B/16 for ImageNet: 86,567,656 parameters.
struct ViTOptions {
  /// Height and width of the images, multiples of patch.
  TORCH_ARG(std::int64_t, image_height) = 224;
  TORCH_ARG(std::int64_t, image_width) = 224;
  TORCH_ARG(std::int64_t, channels) = 3;
  /// Height and width of a patch, which becomes one token.
  TORCH_ARG(std::int64_t, patch) = 16;
  TORCH_ARG(std::int64_t, layers) = 12;
  /// Size of a token's vector; a multiple of heads.
  TORCH_ARG(std::int64_t, width) = 768;
  TORCH_ARG(std::int64_t, heads) = 12;
  /// Width of the hidden layer of the feed-forward part.
  TORCH_ARG(std::int64_t, ffn) = 3072;
  /// Dropout probability, from 0 to below 1. It applies after the position embedding, to the
  /// attention weights, after each sublayer and inside the feed-forward part.
  TORCH_ARG(double, dropout) = 0;
  TORCH_ARG(std::int64_t, classes) = 1000;
};

/// The Vision Transformer (Dosovitskiy et al. 2020) with the parameters of torchvision's: patches
/// and a class token with position embeddings, layers with their LayerNorm before attention and
/// feed-forward (eps 1e-6), a last LayerNorm, and a linear layer on the class token. As in DeiT
/// (Touvron et al. 2021), weights are initialised from a normal distribution with standard
/// deviation 0.02, biases and the class token to 0. The weights of the patches have the standard
/// deviation sqrt(1 / (channels * patch^2)), as in torchvision.
class ViTImpl : public torch::nn::Cloneable<ViTImpl> {
 public:
  /// Error for a size below 1, an image that is not a whole number of patches high and wide, a
  /// width that is not a multiple of heads, or a dropout outside [0, 1).
  explicit ViTImpl(const ViTOptions& options = {});
  void reset() override;

  /// @param images  (N, channels, image_height, image_width), floating. Error for other sizes.
  /// @return        logits, (N, classes)
  at::Tensor forward(const at::Tensor& images);

  const ViTOptions& options() const { return options_; }

  torch::nn::Conv2d patches{nullptr};
  at::Tensor class_token;         ///< (1, 1, width)
  at::Tensor position_embedding;  ///< (1, patches + 1, width); that of the class token is first
  torch::nn::Dropout dropout{nullptr};
  torch::nn::ModuleList layers{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};

 private:
  ViTOptions options_;
};
TORCH_MODULE(ViT);

}  // namespace semitone::zoo
