#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/module.h>

#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

/// The call of a TorchScript module, for the templates that run models of any kind.
namespace semitone::detail {

/// Returns script.forward(inputs...). The inputs are a std::vector<IValue> of all, with or without
/// torch::jit::Kwargs, or IValues and arguments that convert to them, one by one.
template <typename... Inputs>
c10::IValue call_script(torch::jit::Module& script, Inputs&&... inputs) {
  using Given = std::tuple<std::decay_t<Inputs>...>;
  constexpr bool is_list =
      std::is_same_v<Given, std::tuple<std::vector<c10::IValue>>> ||
      std::is_same_v<Given, std::tuple<std::vector<c10::IValue>, torch::jit::Kwargs>>;
  if constexpr (is_list) {
    return script.forward(std::forward<Inputs>(inputs)...);
  } else {
    return script.forward({c10::IValue(std::forward<Inputs>(inputs))...});
  }
}

}  // namespace semitone::detail
