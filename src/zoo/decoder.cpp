#include "semitone/zoo/decoder.h"

#include "semitone/core/error.h"
#include "semitone/recompute/checkpoint.h"
#include "src/zoo/decoder_layer.h"
#include "src/zoo/encoder_layer.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <torch/nn/init.h>
#include <torch/types.h>

#include <cmath>
#include <string>

namespace semitone::zoo {
namespace {

namespace nn = torch::nn;

constexpr auto kDecoder = "zoo.decoder";
constexpr double kNormEps = 1e-5;

std::int64_t kv_heads_of(const DecoderOptions& options) {
  return options.kv_heads().value_or(options.heads());
}

void check(const DecoderOptions& options) {
  const std::int64_t kv_heads = kv_heads_of(options);
  require_size("layers", options.layers(), kDecoder);
  require_size("width", options.width(), kDecoder);
  require_size("heads", options.heads(), kDecoder);
  require_size("kv_heads", kv_heads, kDecoder);
  require_size("ffn", options.ffn(), kDecoder);
  require_size("vocabulary", options.vocabulary(), kDecoder);
  const auto both = [](std::int64_t one, std::int64_t other) {
    return std::to_string(one) + " and " + std::to_string(other);
  };
  if (options.width() % options.heads() != 0) {
    throw Error(kDecoder, "a width that is a multiple of heads",
                both(options.width(), options.heads()));
  }
  if (options.width() / options.heads() % 2 != 0) {
    throw Error(kDecoder, "an even width / heads, for rotary positions",
                std::to_string(options.width() / options.heads()));
  }
  if (options.heads() % kv_heads != 0)
    throw Error(kDecoder, "heads that are a multiple of kv_heads", both(options.heads(), kv_heads));
  if (!(options.rope_theta() > 0 && std::isfinite(options.rope_theta()))) {
    throw Error(kDecoder, "a finite rope_theta above 0", std::to_string(options.rope_theta()));
  }
}

nn::Linear projection(std::int64_t inputs, std::int64_t outputs) {
  nn::Linear result(nn::LinearOptions(inputs, outputs).bias(false));
  const torch::NoGradGuard no_grad;
  nn::init::normal_(result->weight, 0, kInitialDeviation);
  return result;
}

at::Tensor rms_norm(const at::Tensor& rows, const at::Tensor& weight) {
  return at::rms_norm(rows, weight.sizes(), weight, kNormEps);
}

}  // namespace

RotaryPositions rotary_positions(std::int64_t length, std::int64_t size, double theta,
                                 const at::Tensor& like) {
  const auto options =
      at::dtype(c10::promoteTypes(like.scalar_type(), at::kFloat)).device(like.device());
  const at::Tensor frequencies =
      at::arange(0, size, 2, options).mul(-std::log(theta) / static_cast<double>(size)).exp();
  // No matrix product, which a region would lower to 16 bits.
  const at::Tensor of_pairs = at::arange(length, options).unsqueeze(1) * frequencies;
  const at::Tensor angles = at::cat({of_pairs, of_pairs}, 1);
  return {angles.cos(), angles.sin()};
}

at::Tensor rotate(const at::Tensor& heads, const RotaryPositions& positions) {
  const auto halves = heads.chunk(2, -1);
  const at::Tensor turned = at::cat({-halves[1], halves[0]}, -1);
  return heads * positions.cos.to(heads.scalar_type()) +
         turned * positions.sin.to(heads.scalar_type());
}

DecoderLayerImpl::DecoderLayerImpl(const DecoderOptions& options) : options_(options) {
  check(options);
  reset();
}

void DecoderLayerImpl::reset() {
  const std::int64_t width = options_.width();
  const std::int64_t kv_width = width / options_.heads() * kv_heads_of(options_);
  q_proj = register_module("q_proj", projection(width, width));
  k_proj = register_module("k_proj", projection(width, kv_width));
  v_proj = register_module("v_proj", projection(width, kv_width));
  o_proj = register_module("o_proj", projection(width, width));
  gate_proj = register_module("gate_proj", projection(width, options_.ffn()));
  up_proj = register_module("up_proj", projection(width, options_.ffn()));
  down_proj = register_module("down_proj", projection(options_.ffn(), width));
  norm1 = register_parameter("norm1", torch::ones({width}));
  norm2 = register_parameter("norm2", torch::ones({width}));
}

at::Tensor DecoderLayerImpl::attend(const at::Tensor& rows, const RotaryPositions& positions) {
  const std::int64_t length = positions.cos.size(0);
  const std::int64_t heads = options_.heads();
  const std::int64_t kv_heads = kv_heads_of(options_);
  const auto divide = [&](const at::Tensor& projected, std::int64_t parts) {
    return projected.view({-1, length, parts, options_.width() / heads}).transpose(1, 2);
  };
  const at::Tensor queries = rotate(divide(q_proj(rows), heads), positions);
  const at::Tensor keys = rotate(divide(k_proj(rows), kv_heads), positions);
  const at::Tensor values = divide(v_proj(rows), kv_heads);
  const at::Tensor mixed = at::scaled_dot_product_attention(
      queries, keys, values, /*attn_mask=*/{}, /*dropout_p=*/0, /*is_causal=*/true, /*scale=*/{},
      /*enable_gqa=*/kv_heads != heads);
  return o_proj(mixed.transpose(1, 2).reshape(rows.sizes()));
}

at::Tensor DecoderLayerImpl::feed_forward(const at::Tensor& rows) {
  return down_proj(at::silu(gate_proj(rows)) * up_proj(rows));
}

at::Tensor DecoderLayerImpl::forward(const at::Tensor& rows, const RotaryPositions& positions) {
  const at::Tensor x = rows + attend(rms_norm(rows, norm1), positions);
  return x + feed_forward(rms_norm(x, norm2));
}

DecoderImpl::DecoderImpl(const DecoderOptions& options) : options_(options) {
  check(options);
  reset();
}

void DecoderImpl::reset() {
  const std::int64_t width = options_.width();
  token_embedding = register_module("token_embedding", nn::Embedding(options_.vocabulary(), width));
  layers = register_module("layers", nn::ModuleList());
  for (std::int64_t i = 0; i < options_.layers(); ++i) layers->push_back(DecoderLayer(options_));
  norm = register_parameter("norm", torch::ones({width}));
  // A tied weight is registered once, as Encoder's.
  if (!options_.tied_head())
    head = register_module("head", projection(width, options_.vocabulary()));
  const torch::NoGradGuard no_grad;
  nn::init::normal_(token_embedding->weight, 0, kInitialDeviation);
}

at::Tensor DecoderImpl::forward(const at::Tensor& tokens) {
  require_tokens(tokens, kDecoder);
  const std::int64_t length = tokens.size(1);
  if (length < 1) throw Error(kDecoder, "sequences of at least 1 token", std::to_string(length));
  at::Tensor rows = token_embedding(tokens).flatten(0, 1);
  const RotaryPositions positions =
      rotary_positions(length, options_.width() / options_.heads(), options_.rope_theta(), rows);
  const auto how = semitone::nn::CheckpointOptions().preserve_rng_state(false);  // no dropout
  for (const auto& layer : *layers) {
    const auto run = [layer, positions](const at::Tensor& x) {
      return layer->as<DecoderLayerImpl>()->forward(x, positions);
    };
    rows = options_.checkpoint_layers() ? semitone::nn::checkpoint(how, run, rows) : run(rows);
  }
  rows = rms_norm(rows, norm);
  return options_.tied_head() ? at::linear(rows, token_embedding->weight) : head(rows);
}

}  // namespace semitone::zoo
