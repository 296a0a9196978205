#pragma once

#include "semitone/amp/model.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_map>

namespace semitone::amp {

/// What parameters are called, for messages: a parameter of an optimizer is an anonymous tensor,
/// its name is the model's.
class ParameterNames {
 public:
  struct Name {
    std::string name;      ///< "conv1.weight"
    std::size_t position;  ///< in the order in which parameters were added: the model's
  };

  /// Learns the names of a model's parameters; prefix is put in front. The first name stays.
  void add(const Model& model, std::string_view prefix = {});
  /// Learns that a tensor stands for a known parameter: a master weight. Nothing happens if the
  /// parameter is not known.
  void add_alias(const at::Tensor& alias, const at::Tensor& parameter);

  /// Null if the parameter is not known.
  const Name* find(const at::Tensor& parameter) const;

 private:
  // Addresses are only compared. A parameter that dies may leave its name to a later one at the
  // same place: wrong in a message, never in a computation.
  std::unordered_map<const c10::TensorImpl*, Name> names_;
};

}  // namespace semitone::amp
