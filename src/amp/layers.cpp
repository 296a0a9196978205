#include "src/amp/layers.h"

#include "semitone/core/keep_fp32.h"
#include "semitone/nn/fused_dense.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace semitone::amp {
namespace {

using Kind = Layer::Kind;
using Sizes = std::vector<Layer::Size>;

class Collector {
 public:
  explicit Collector(std::vector<Layer>& layers) : layers_(layers) {}

  void walk(const torch::nn::Module& module, const std::string& path) {
    is_marked_fp32_ = dynamic_cast<const KeepFp32*>(&module) != nullptr;
    visit(module, path);
    for (const auto& child : module.named_children())
      walk(*child.value(), path + child.key() + ".");
  }

  void walk(const torch::jit::Module& module, const std::string& path) {
    is_marked_fp32_ = false;
    visit(module, path);
    for (const auto& child : module.named_children()) walk(child.value, path + child.name + ".");
  }

 private:
  void visit(const torch::nn::Module& module, const std::string& path);
  void visit(const torch::jit::Module& module, const std::string& path);

  template <typename... Convolutions>
  bool add_convolution(const torch::nn::Module& module, const std::string& path) {
    const auto add_one = [&](const auto* layer) {
      if (layer == nullptr) return false;
      const std::int64_t groups = layer->options.groups();
      add(path, Kind::convolution, layer->weight, "weight",
          {{"in_channels", layer->options.in_channels() / groups},
           {"out_channels", layer->options.out_channels() / groups}});
      return true;
    };
    return (add_one(dynamic_cast<const Convolutions*>(&module)) || ...);
  }

  template <typename... Networks>
  bool add_recurrent(const torch::nn::Module& module, const std::string& path) {
    const auto add_one = [&](const auto* layer) {
      if (layer == nullptr) return false;
      add(path, Kind::product, layer->named_parameters()["weight_ih_l0"], "weight_ih_l0",
          {{"input_size", layer->options_base.input_size()},
           {"hidden_size", layer->options_base.hidden_size()}});
      return true;
    };
    return (add_one(dynamic_cast<const Networks*>(&module)) || ...);
  }

  // A weight of out_features rows and in_features columns.
  void add_linear(const std::string& path, const at::Tensor& weight, const std::string& name) {
    if (!weight.defined() || weight.dim() != 2) return;
    add(path, Kind::product, weight, name,
        {{"in_features", weight.size(1)}, {"out_features", weight.size(0)}});
  }

  void add(const std::string& path, Kind kind, const at::Tensor& weight,
           const std::string& weight_name, Sizes sizes) {
    if (!weight.defined()) return;
    const std::string name = path.empty() ? "the model" : path.substr(0, path.size() - 1);
    layers_.push_back({name, kind, std::move(sizes), weight, path + weight_name, is_marked_fp32_});
  }

  std::vector<Layer>& layers_;
  bool is_marked_fp32_ = false;  // the module that is visited
};

void Collector::visit(const torch::nn::Module& module, const std::string& path) {
  using namespace torch::nn;  // NOLINT(google-build-using-namespace): a dozen names
  if (add_convolution<Conv1dImpl, Conv2dImpl, Conv3dImpl, ConvTranspose1dImpl, ConvTranspose2dImpl,
                      ConvTranspose3dImpl>(module, path) ||
      add_recurrent<LSTMImpl, GRUImpl, RNNImpl>(module, path))
    return;
  if (const auto* const linear = dynamic_cast<const LinearImpl*>(&module)) {
    add_linear(path, linear->weight, "weight");
  } else if (const auto* const table = dynamic_cast<const EmbeddingImpl*>(&module)) {
    add(path, Kind::embedding, table->weight, "weight",
        {{"num_embeddings", table->options.num_embeddings()}});
  } else if (const auto* const attention = dynamic_cast<const MultiheadAttentionImpl*>(&module)) {
    add(path, Kind::product, attention->in_proj_weight, "in_proj_weight",
        {{"embed_dim / num_heads",
          attention->options.embed_dim() / attention->options.num_heads()}});
  } else if (dynamic_cast<const semitone::nn::FusedDenseImpl*>(&module) != nullptr ||
             dynamic_cast<const semitone::nn::FusedDenseGeluDenseImpl*>(&module) != nullptr ||
             dynamic_cast<const semitone::nn::MLPImpl*>(&module) != nullptr) {
    for (const auto& parameter : module.named_parameters(/*recurse=*/false))
      add_linear(path, parameter.value(), parameter.key());
  }
}

// TorchScript keeps the names of Python's classes.
void Collector::visit(const torch::jit::Module& module, const std::string& path) {
  const auto type = module.type()->name();
  if (!type.has_value() || !module.hasattr("weight") || !module.attr("weight").isTensor()) return;
  const std::string& name = type->name();
  const at::Tensor weight = module.attr("weight").toTensor();
  if (!weight.defined() || weight.dim() < 2) return;
  if (name == "Linear") {
    add_linear(path, weight, "weight");
  } else if (name == "Embedding") {
    add(path, Kind::embedding, weight, "weight", {{"num_embeddings", weight.size(0)}});
  } else if (name.starts_with("Conv") && weight.dim() > 2) {
    // The group's share of one of them, which suffices: channels are divided evenly.
    const bool transposed = name.starts_with("ConvTranspose");
    add(path, Kind::convolution, weight, "weight",
        {{"in_channels", weight.size(transposed ? 0 : 1)},
         {"out_channels", weight.size(transposed ? 1 : 0)}});
  }
}

}  // namespace

std::vector<Layer> layers_of(const Model& model) {
  std::vector<Layer> layers;
  Collector collector(layers);
  if (const torch::nn::Module* const module = model.module()) {
    collector.walk(*module, "");
  } else {
    collector.walk(*model.script(), "");
  }
  return layers;
}

}  // namespace semitone::amp
