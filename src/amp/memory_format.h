#pragma once

#include "semitone/amp/model.h"

#include <ATen/core/Tensor.h>

#include <vector>

// Images whose channels lie next to each other in memory: what convolutions on CPUs and tensor cores
// are fastest with.
namespace semitone::amp {

// The weights of a model's Conv2d and ConvTranspose2d layers, of TorchScript too.
std::vector<at::Tensor> conv2d_weights(const Model& model);

// Lays tensors of 4 dimensions out in a format, in place, gradients too. Those among them that share
// their memory go on sharing it; others that did are parted from them.
void lay_out(const std::vector<at::Tensor>& tensors, at::MemoryFormat format);

}  // namespace semitone::amp
