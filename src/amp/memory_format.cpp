#include "src/amp/memory_format.h"

#include "src/core/for_each_module.h"
#include "src/scaling/same_memory.h"

#include <torch/nn/modules/conv.h>
#include <torch/types.h>

#include <cstddef>
#include <string>

namespace semitone::amp {
namespace {

bool has_layout(const at::Tensor& tensor, at::MemoryFormat format) {
  return tensor.strides() ==
         at::empty(tensor.sizes(), tensor.options().device(at::kMeta).memory_format(format))
             .strides();
}

void add(const at::Tensor& weight, std::vector<at::Tensor>& weights) {
  if (weight.defined() && weight.dim() == 4) weights.push_back(weight);
}

void collect(const torch::nn::Module& model, std::vector<at::Tensor>& weights) {
  for_each_module(model, [&](const torch::nn::Module& layer) {
    if (const auto* conv = layer.as<torch::nn::Conv2d>()) add(conv->weight, weights);
    if (const auto* conv = layer.as<torch::nn::ConvTranspose2d>()) add(conv->weight, weights);
  });
}

void collect(const torch::jit::Module& script, std::vector<at::Tensor>& weights) {
  for (const torch::jit::Module& layer : script.modules()) {
    const auto name = layer.type()->name();
    if (!name.has_value() || !layer.hasattr("weight") || !layer.attr("weight").isTensor()) continue;
    const std::string& class_name = name->name();
    if (class_name == "Conv2d" || class_name == "ConvTranspose2d")
      add(layer.attr("weight").toTensor(), weights);
  }
}

}  // namespace

std::vector<at::Tensor> conv2d_weights(const Model& model) {
  std::vector<at::Tensor> weights;
  if (const torch::nn::Module* module = model.module()) {
    collect(*module, weights);
  } else {
    collect(*model.script(), weights);
  }
  return weights;
}

void lay_out(const std::vector<at::Tensor>& tensors, at::MemoryFormat format) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> before;
  before.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) before.push_back(tensor.variable_data());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (has_layout(before[i], format)) continue;
    std::size_t first = 0;  // of those that share their memory with it
    while (!same_memory(before[first], before[i])) ++first;
    // Not contiguous(): if both formats use the same memory, as with one channel, the strides must
    // tell which format it is.
    tensors[i].set_data(first < i ? tensors[first].variable_data() : before[i].clone(format));
    if (at::Tensor& grad = tensors[i].mutable_grad(); grad.defined()) grad = grad.clone(format);
  }
}

}  // namespace semitone::amp
