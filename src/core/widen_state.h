#pragma once

// Internal interface: other rooms include this header.

#include <torch/optim/optimizer.h>

namespace semitone {

// Converts the 16-bit tensors of a state of LibTorch's optimizers to fp32: they have the dtype of
// the parameters that they were made for, and load() keeps it. Others, such as Semitone's, choose
// the dtypes of their state themselves, and are left alone.
void widen_state(torch::optim::OptimizerParamState& state);

}  // namespace semitone
