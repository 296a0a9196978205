#pragma once

#include "semitone/autocast/model.h"

#include <ATen/core/Tensor.h>

#include <vector>

// The memory format of images with the channels innermost, in which convolutions are fastest on
// CPUs and tensor cores.
namespace semitone::amp {

// The weights of a model's Conv2d and ConvTranspose2d layers, also in TorchScript.
std::vector<at::Tensor> conv2d_weights(const Model& model);

// Converts 4-D tensors to a memory format, in place, with their gradients. Tensors in the list that
// share memory still share it; other tensors that shared it get memory of their own.
void lay_out(const std::vector<at::Tensor>& tensors, at::MemoryFormat format);

}  // namespace semitone::amp
