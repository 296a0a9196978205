#pragma once

#include "semitone/autocast/model.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

// The layers of models whose sizes decide how fast tensor cores are.
namespace semitone::amp {

struct Layer {
  enum class Kind { product, convolution, embedding };
  struct Size {
    const char* name;  // as in the options of torch::nn
    std::int64_t value;
  };

  std::string name;  // "features.0"
  Kind kind;
  std::vector<Size> sizes;
  at::Tensor weight;
  std::string weight_name;  // "features.0.weight"
  bool is_marked_fp32;      // KeepFp32
};

// The layers of torch::nn and semitone::nn in a model, also in TorchScript.
std::vector<Layer> layers_of(const Model& model);

}  // namespace semitone::amp
