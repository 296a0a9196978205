#pragma once

#include "semitone/amp/model.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <unordered_map>

namespace semitone::amp {

/// What parameters are called, for messages: a parameter of an optimizer is an anonymous tensor,
/// its name is the model's.
class ParameterNames {
 public:
  /// Learns the names of a model's parameters, e.g. "conv1.weight"; prefix is put in front. The
  /// first name stays.
  void add(const Model& model, std::string_view prefix = {});
  void add(const at::Tensor& parameter, std::string name);

  /// The name, or otherwise if it is not known.
  std::string of(const at::Tensor& parameter, std::string_view otherwise) const;

 private:
  // Addresses are only compared. A parameter that dies may leave its name to a later one at the
  // same place: wrong in a message, never in a computation.
  std::unordered_map<const c10::TensorImpl*, std::string> names_;
};

}  // namespace semitone::amp
