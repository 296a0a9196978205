#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/module.h>

#include <type_traits>
#include <utility>

namespace semitone::parallel {

/// What DistributedDataParallel and DataParallel have in common: the model that they run, and access
/// to it. `wrapper->` is the model, for all but forward.
///
/// @tparam Model  a module holder (Net), a std::shared_ptr to a module, or torch::jit::Module
template <typename Model>
class WrappedModel {
 public:
  /// The model.
  auto& module() {
    if constexpr (kIsScript) {
      return model_;
    } else {
      return *model_;
    }
  }
  const auto& module() const {
    if constexpr (kIsScript) {
      return model_;
    } else {
      return *model_;
    }
  }
  auto& operator*() { return module(); }
  const auto& operator*() const { return module(); }
  auto* operator->() { return &module(); }

 protected:
  explicit WrappedModel(Model model) : model_(std::move(model)) {}

  /// The forward of the model, or of a copy; a TorchScript one takes IValues, or what becomes one.
  template <typename Module, typename... Arguments>
  static auto call(Module& module, Arguments&&... arguments) {
    if constexpr (kIsScript) {
      return module.forward({c10::IValue(std::forward<Arguments>(arguments))...});
    } else {
      return module.forward(std::forward<Arguments>(arguments)...);
    }
  }

 private:
  static constexpr bool kIsScript = std::is_same_v<Model, torch::jit::Module>;

  Model model_;
};

}  // namespace semitone::parallel
