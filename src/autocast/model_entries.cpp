#include "src/autocast/model_entries.h"

#include "semitone/core/keep_fp32.h"

#include <torch/nn/modules/batchnorm.h>

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
             std::vector<ModelEntry>& entries) {
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
             std::vector<ModelEntry>& entries) {
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

std::vector<ModelEntry> entries_of(const Model& model) {
  std::vector<ModelEntry> entries;
  if (const torch::nn::Module* const module = model.module()) {
    collect(*module, "", entries);
  } else {
    collect(*model.script(), "", entries);
  }
  return entries;
}

}  // namespace semitone::amp
