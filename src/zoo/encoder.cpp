#include "semitone/zoo/encoder.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/recompute/checkpoint.h"
#include "src/zoo/encoder_layer.h"

#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/init.h>
#include <torch/types.h>

#include <string>
#include <string_view>

namespace semitone::zoo {
namespace {

namespace nn = torch::nn;

constexpr auto kEncoder = "zoo.encoder";

void check(const EncoderOptions& options) {
  check_layers(options, kEncoder);
  require_size("vocabulary", options.vocabulary(), kEncoder);
  require_size("max_positions", options.max_positions(), kEncoder);
}

void initialize(nn::Module& module) {
  const torch::NoGradGuard no_grad;
  if (auto* const linear = module.as<nn::Linear>()) {
    nn::init::normal_(linear->weight, 0, kInitialDeviation);
    nn::init::zeros_(linear->bias);
  } else if (auto* const embedding = module.as<nn::Embedding>()) {
    nn::init::normal_(embedding->weight, 0, kInitialDeviation);
  }
}

}  // namespace

nn::LayerNorm layer_norm(std::int64_t width, double eps) {
  return nn::LayerNorm(nn::LayerNormOptions({width}).eps(eps));
}

void require_size(std::string_view name, std::int64_t size, std::string_view component) {
  if (size >= 1) return;
  throw Error(component, std::string(name) + " of at least 1", std::to_string(size));
}

void require_tokens(const at::Tensor& tokens, std::string_view component) {
  if (tokens.dim() == 2 && tokens.scalar_type() == torch::kLong) return;
  throw Error(component, "int64 tokens (N, length)",
              c10::str(dtype_name(tokens.scalar_type()), " of sizes ", tokens.sizes()));
}

void check_layers(const EncoderOptions& options, std::string_view component) {
  require_size("layers", options.layers(), component);
  require_size("width", options.width(), component);
  require_size("heads", options.heads(), component);
  require_size("ffn", options.ffn(), component);
  if (options.width() % options.heads() != 0) {
    throw Error(component, "a width that is a multiple of heads",
                std::to_string(options.width()) + " and " + std::to_string(options.heads()));
  }
  if (!(options.dropout() >= 0 && options.dropout() < 1))
    throw Error(component, "dropout from 0 to below 1", std::to_string(options.dropout()));
}

EncoderLayerImpl::EncoderLayerImpl(const EncoderOptions& options, const LayerNorms& norms)
    : options_(options), norms_(norms) {
  check(options);
  reset();
}

void EncoderLayerImpl::reset() {
  const std::int64_t width = options_.width();
  in_proj = register_module("in_proj", nn::Linear(width, 3 * width));
  out_proj = register_module("out_proj", nn::Linear(width, width));
  linear1 = register_module("linear1", nn::Linear(width, options_.ffn()));
  linear2 = register_module("linear2", nn::Linear(options_.ffn(), width));
  norm1 = register_module("norm1", layer_norm(width, norms_.eps));
  norm2 = register_module("norm2", layer_norm(width, norms_.eps));
  dropout = register_module("dropout", nn::Dropout(options_.dropout()));
  apply(initialize);
}

at::Tensor EncoderLayerImpl::attend(const at::Tensor& rows, std::int64_t length) {
  const std::int64_t heads = options_.heads();
  const auto parts = in_proj(rows)
                         .view({-1, length, 3, heads, options_.width() / heads})
                         .permute({2, 0, 3, 1, 4})
                         .unbind();
  const at::Tensor mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {},
                                                            is_training() ? options_.dropout() : 0);
  return out_proj(mixed.transpose(1, 2).reshape(rows.sizes()));
}

at::Tensor EncoderLayerImpl::feed_forward(const at::Tensor& rows) {
  const at::Tensor hidden = dropout(nn::functional::gelu(linear1(rows)));
  return linear2(hidden);
}

at::Tensor EncoderLayerImpl::forward(const at::Tensor& rows, std::int64_t length) {
  if (norms_.first) {
    const at::Tensor x = rows + dropout(attend(norm1(rows), length));
    return x + dropout(feed_forward(norm2(x)));
  }
  const at::Tensor x = norm1(rows + dropout(attend(rows, length)));
  return norm2(x + dropout(feed_forward(x)));
}

EncoderImpl::EncoderImpl(const EncoderOptions& options) : options_(options) {
  check(options);
  reset();
}

void EncoderImpl::reset() {
  const std::int64_t width = options_.width();
  token_embedding = register_module("token_embedding", nn::Embedding(options_.vocabulary(), width));
  position_embedding =
      register_module("position_embedding", nn::Embedding(options_.max_positions(), width));
  norm = register_module("norm", layer_norm(width, LayerNorms().eps));
  dropout = register_module("dropout", nn::Dropout(options_.dropout()));
  layers = register_module("layers", nn::ModuleList());
  for (std::int64_t i = 0; i < options_.layers(); ++i) layers->push_back(EncoderLayer(options_));
  // A tied weight is registered once: otherwise LibTorch's parameters() would list it twice, and
  // its optimizers would step it twice.
  if (options_.tied_head()) {
    head_bias = register_parameter("head_bias", torch::zeros({options_.vocabulary()}));
  } else {
    head = register_module("head", nn::Linear(width, options_.vocabulary()));
  }
  apply(initialize);
}

at::Tensor EncoderImpl::forward(const at::Tensor& tokens) {
  require_tokens(tokens, kEncoder);
  const std::int64_t length = tokens.size(1);
  if (length < 1 || length > options_.max_positions()) {
    throw Error(kEncoder,
                "sequences of 1 to " + std::to_string(options_.max_positions()) + " tokens",
                std::to_string(length), "raise max_positions");
  }
  const at::Tensor positions =
      torch::arange(length, torch::dtype(torch::kLong).device(tokens.device()));
  // One matrix from here on: a Linear of a matrix adds its bias in the same pass.
  at::Tensor rows = (token_embedding(tokens) + position_embedding(positions)).flatten(0, 1);
  rows = dropout(norm(rows));
  const auto how = semitone::nn::CheckpointOptions().preserve_rng_state(options_.dropout() != 0);
  for (const auto& layer : *layers) {
    const auto run = [layer, length](const at::Tensor& x) {
      return layer->as<EncoderLayerImpl>()->forward(x, length);
    };
    rows = options_.checkpoint_layers() ? semitone::nn::checkpoint(how, run, rows) : run(rows);
  }
  return options_.tied_head() ? torch::addmm(head_bias, rows, token_embedding->weight.t())
                              : head(rows);
}

}  // namespace semitone::zoo
