#pragma once

#include "semitone/core/detail/call_script.h"

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <type_traits>
#include <utility>

namespace semitone::parallel::detail {

/// The common base of DistributedDataParallel and DataParallel: holds the model and gives access to
/// it. `wrapper->` is the model, for everything except forward.
///
/// @tparam Model  a module holder (Net), a std::shared_ptr to a module, torch::jit::Module, or a
/// std::reference_wrapper of a module, which is deduced for a module object
template <typename Model>
class WrappedModel {
  static_assert(!std::is_base_of_v<torch::nn::Module, Model>,
                "a module passed by value would be trained as a copy: pass a named module (it is "
                "taken by reference), a std::shared_ptr to it, or a module holder");

 public:
  /// The model.
  auto& module() { return module_of(model_); }
  const auto& module() const { return module_of(model_); }
  auto& operator*() { return module(); }
  const auto& operator*() const { return module(); }
  auto* operator->() { return &module(); }

 protected:
  explicit WrappedModel(Model model) : model_(std::move(model)) {}

  /// Calls the forward of the model, or of a copy. A TorchScript module takes what call_script
  /// takes.
  template <typename Module, typename... Arguments>
  static auto call(Module& module, Arguments&&... arguments) {
    if constexpr (kIsScript) {
      return semitone::detail::call_script(module, std::forward<Arguments>(arguments)...);
    } else {
      return module.forward(std::forward<Arguments>(arguments)...);
    }
  }

 private:
  static constexpr bool kIsScript = std::is_same_v<Model, torch::jit::Module>;

  template <typename Held>
  static auto& module_of(Held& held) {
    if constexpr (kIsScript) {
      return held;
    } else if constexpr (requires { *held; }) {
      return *held;
    } else {
      return held.get();
    }
  }

  Model model_;
};

}  // namespace semitone::parallel::detail
