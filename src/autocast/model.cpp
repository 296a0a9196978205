#include "semitone/autocast/model.h"

#include "semitone/core/error.h"
#include "semitone/core/keep_fp32.h"

#include <torch/nn/modules/batchnorm.h>

#include <string>
#include <utility>
#include <vector>

namespace semitone::amp {
namespace {

template <typename Norm>
bool is_affine(const torch::nn::Module& module) {
  const auto* norm = dynamic_cast<const Norm*>(&module);
  return norm != nullptr && norm->options.affine();
}

// Affine layers only: others have no weights to keep, and their arithmetic follows the input.
bool keeps_fp32(const torch::nn::Module& module) {
  return dynamic_cast<const KeepFp32*>(&module) != nullptr ||
         is_affine<torch::nn::BatchNorm1dImpl>(module) ||
         is_affine<torch::nn::BatchNorm2dImpl>(module) ||
         is_affine<torch::nn::BatchNorm3dImpl>(module);
}

// TorchScript keeps the Python class's name: __torch__.torch.nn.modules.batchnorm.BatchNorm2d, or
// SyncBatchNorm.
bool keeps_fp32(const torch::jit::Module& module) {
  const auto name = module.type()->name();
  if (!name.has_value()) return false;
  const std::string& class_name = name->name();
  const bool is_norm = class_name.find("BatchNorm") != std::string::npos;
  return is_norm && module.hasattr("weight") && module.attr("weight").isTensor();
}

void collect(const torch::nn::Module& module, const std::string& prefix,
             std::vector<Model::Entry>& entries) {
  const bool keep = keeps_fp32(module);
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    if (item.value().defined()) entries.push_back({prefix + item.key(), item.value(), true, keep});
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    if (item.value().defined()) entries.push_back({prefix + item.key(), item.value(), false, keep});
  }
  for (const auto& item : module.named_children())
    collect(*item.value(), prefix + item.key() + ".", entries);
}

void collect(const torch::jit::Module& module, const std::string& prefix,
             std::vector<Model::Entry>& entries) {
  const bool keep = keeps_fp32(module);
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    entries.push_back({prefix + item.name, item.value, true, keep});
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    entries.push_back({prefix + item.name, item.value, false, keep});
  }
  for (const auto& item : module.named_children())
    collect(item.value, prefix + item.name + ".", entries);
}

}  // namespace

Model::Model(std::shared_ptr<torch::nn::Module> module) : held_(std::move(module)) {
  if (std::get<0>(held_) == nullptr) {
    throw Error("amp.initialize", "a model", "an empty module holder",
                "construct the module first");
  }
}
Model::Model(torch::nn::Module& module) : held_(&module) {}
Model::Model(torch::jit::Module module) : held_(std::move(module)) {}

torch::nn::Module* Model::module() const {
  if (const auto* shared = std::get_if<0>(&held_)) return shared->get();
  if (const auto* reference = std::get_if<1>(&held_)) return *reference;
  return nullptr;
}

const torch::jit::Module* Model::script() const {
  return std::get_if<torch::jit::Module>(&held_);
}

const void* Model::identity() const {
  const torch::nn::Module* nn_module = module();
  return nn_module != nullptr ? static_cast<const void*>(nn_module)
                              : static_cast<const void*>(std::get<2>(held_)._ivalue().get());
}

std::vector<Model::Entry> Model::entries() const {
  std::vector<Entry> entries;
  if (const torch::nn::Module* nn_module = module()) {
    collect(*nn_module, "", entries);
  } else {
    collect(std::get<2>(held_), "", entries);
  }
  return entries;
}

}  // namespace semitone::amp
