#include "semitone/zoo/vit.h"

#include "semitone/core/error.h"
#include "src/zoo/encoder_layer.h"

#include <c10/util/StringUtil.h>
#include <torch/nn/init.h>
#include <torch/types.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

namespace semitone::zoo {
namespace {

constexpr auto kViT = "zoo.vit";
constexpr LayerNorms kNormsFirst{.first = true, .eps = 1e-6};

EncoderOptions layer_options(const ViTOptions& options) {
  return EncoderOptions()
      .layers(options.layers())
      .width(options.width())
      .heads(options.heads())
      .ffn(options.ffn())
      .dropout(options.dropout());
}

void check(const ViTOptions& options) {
  check_layers(layer_options(options), kViT);
  require_size("patch", options.patch(), kViT);
  require_size("channels", options.channels(), kViT);
  require_size("classes", options.classes(), kViT);
  for (const auto& [name, size] : {std::pair{"image_height", options.image_height()},
                                   std::pair{"image_width", options.image_width()}}) {
    require_size(name, size, kViT);
    if (size % options.patch() != 0) {
      throw Error(kViT, std::string(name) + " that is a multiple of patch",
                  std::to_string(size) + " and " + std::to_string(options.patch()));
    }
  }
}

}  // namespace

ViTImpl::ViTImpl(const ViTOptions& options) : options_(options) {
  check(options);
  reset();
}

void ViTImpl::reset() {
  namespace nn = torch::nn;
  const std::int64_t width = options_.width();
  const std::int64_t patch = options_.patch();
  patches = register_module(
      "patches", nn::Conv2d(nn::Conv2dOptions(options_.channels(), width, patch).stride(patch)));
  const std::int64_t tokens = (options_.image_height() / patch) * (options_.image_width() / patch);
  class_token = register_parameter("class_token", torch::zeros({1, 1, width}));
  position_embedding = register_parameter(
      "position_embedding", torch::randn({1, tokens + 1, width}).mul_(kInitialDeviation));
  dropout = register_module("dropout", nn::Dropout(options_.dropout()));
  layers = register_module("layers", nn::ModuleList());
  for (std::int64_t i = 0; i < options_.layers(); ++i)
    layers->push_back(EncoderLayer(layer_options(options_), kNormsFirst));
  norm = register_module("norm", layer_norm(width, kNormsFirst.eps));
  head = register_module("head", nn::Linear(width, options_.classes()));
  const torch::NoGradGuard no_grad;
  const auto inputs = static_cast<double>(options_.channels() * patch * patch);
  nn::init::normal_(patches->weight, 0, std::sqrt(1 / inputs));
  nn::init::zeros_(patches->bias);
  nn::init::normal_(head->weight, 0, kInitialDeviation);
  nn::init::zeros_(head->bias);
}

at::Tensor ViTImpl::forward(const at::Tensor& images) {
  const std::vector<std::int64_t> sizes{options_.channels(), options_.image_height(),
                                        options_.image_width()};
  if (images.dim() != 4 || images.sizes().slice(1) != at::IntArrayRef(sizes)) {
    throw Error(kViT, c10::str("images of sizes (N, ", c10::Join(", ", sizes), ")"),
                c10::str(images.sizes()), "pad or scale them, or set the sizes in ViTOptions");
  }
  at::Tensor x = patches(images).flatten(2).transpose(1, 2);
  x = torch::cat({class_token.expand({images.size(0), 1, -1}), x}, 1) + position_embedding;
  const std::int64_t length = x.size(1);
  at::Tensor rows = dropout(x).flatten(0, 1);
  for (const auto& layer : *layers) rows = layer->as<EncoderLayerImpl>()->forward(rows, length);
  // A LayerNorm of the class tokens alone gives the same as one of all tokens.
  return head(norm(rows.view({-1, length, options_.width()}).select(1, 0)));
}

}  // namespace semitone::zoo
