// Walks a model's layers.

#pragma once

#include <torch/nn/module.h>

#include <set>

namespace semitone {

// Calls visit(layer) for a module and every module inside it, parents before children, each module
// once. Module::modules() throws for a model that is not owned by a shared pointer; this does not.
// ModuleType is torch::nn::Module, const or not.
template <typename ModuleType, typename Visit>
void for_each_module(ModuleType& module, const Visit& visit) {
  std::set<const torch::nn::Module*> seen;
  const auto walk = [&](auto& self, ModuleType& layer) -> void {
    if (!seen.insert(&layer).second) return;
    visit(layer);
    for (const auto& child : layer.children()) self(self, *child);
  };
  walk(walk, module);
}

}  // namespace semitone
