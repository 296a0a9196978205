#pragma once

// Internal interface: other rooms include this header.

#include "semitone/autocast/model.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace semitone::amp {

// One parameter or buffer of a model.
struct ModelEntry {
  std::string name;   // "layer1.conv.weight"
  at::Tensor tensor;  // the model's own tensor: set_data() on it changes the model
  bool is_parameter;
  bool keep_fp32;  // belongs to an affine BatchNorm, or to a module marked KeepFp32
};

// Returns all parameters and buffers, in the model's order. A tensor that occurs twice appears
// twice.
std::vector<ModelEntry> entries_of(const Model& model);

}  // namespace semitone::amp
