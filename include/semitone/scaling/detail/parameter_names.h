#pragma once

#include "semitone/autocast/model.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_map>

namespace semitone::amp::detail {

/// Names of parameters for messages. An optimizer holds anonymous tensors; the names are the
/// model's.
class ParameterNames {
 public:
  struct Name {
    std::string name;      ///< "conv1.weight"
    std::size_t position;  ///< in the order in which parameters were added, which is the model's
  };

  /// Adds the names of a model's parameters, with a prefix. A parameter that already has a name
  /// keeps it.
  void add(const Model& model, std::string_view prefix = {});
  /// Adds a tensor that stands for a parameter, such as a master weight. No effect if the parameter
  /// has no name.
  void add_alias(const at::Tensor& alias, const at::Tensor& parameter);

  /// Returns a parameter's name, or null if it has none.
  const Name* find(const at::Tensor& parameter) const;

 private:
  // Addresses are only compared. After a parameter is destroyed, a later one at the same address
  // may get its name: wrong in a message, never in a computation.
  std::unordered_map<const c10::TensorImpl*, Name> names_;
};

}  // namespace semitone::amp::detail
