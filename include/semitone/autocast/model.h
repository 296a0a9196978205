#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

namespace semitone::amp {

/// A model to prepare for mixed precision: a torch::nn::Module in any holder, or a TorchScript
/// module. It converts from all of them. It shares ownership of a model in a shared pointer, and
/// refers to a model that is passed by reference.
class Model {
 public:
  template <typename Module,
            typename = std::enable_if_t<std::is_base_of_v<torch::nn::Module, Module>>>
  Model(const std::shared_ptr<Module>& module)  // NOLINT(google-explicit-constructor)
      : Model(std::shared_ptr<torch::nn::Module>(module)) {}
  template <typename Module>
  Model(const torch::nn::ModuleHolder<Module>& holder)  // NOLINT(google-explicit-constructor)
      : Model(std::shared_ptr<torch::nn::Module>(holder.is_empty() ? nullptr : holder.ptr())) {}
  Model(const torch::nn::AnyModule& module)  // NOLINT(google-explicit-constructor)
      : Model(module.is_empty() ? nullptr : module.ptr()) {}
  Model(std::shared_ptr<torch::nn::Module> module);  // NOLINT(google-explicit-constructor)
  Model(torch::nn::Module& module);                  // NOLINT(google-explicit-constructor)
  Model(torch::jit::Module module);                  // NOLINT(google-explicit-constructor)

  /// The torch::nn::Module, or null for a TorchScript module.
  torch::nn::Module* module() const;
  /// The TorchScript module, or null for a torch::nn::Module.
  const torch::jit::Module* script() const;

  /// The identity of a model: the address of its torch::nn::Module or of its TorchScript object.
  const void* identity() const;
  bool is(const Model& other) const { return identity() == other.identity(); }

 private:
  std::variant<std::shared_ptr<torch::nn::Module>, torch::nn::Module*, torch::jit::Module> held_;
};

}  // namespace semitone::amp
