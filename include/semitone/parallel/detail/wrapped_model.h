#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

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

  /// Calls the forward of the model, or of a copy. A TorchScript module takes IValues, arguments
  /// that convert to them, or a std::vector<IValue> of all inputs, with or without
  /// torch::jit::Kwargs.
  template <typename Module, typename... Arguments>
  static auto call(Module& module, Arguments&&... arguments) {
    using Given = std::tuple<std::decay_t<Arguments>...>;
    constexpr bool is_list =
        std::is_same_v<Given, std::tuple<std::vector<c10::IValue>>> ||
        std::is_same_v<Given, std::tuple<std::vector<c10::IValue>, torch::jit::Kwargs>>;
    if constexpr (kIsScript && is_list) {
      return module.forward(std::forward<Arguments>(arguments)...);
    } else if constexpr (kIsScript) {
      return module.forward({c10::IValue(std::forward<Arguments>(arguments))...});
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
