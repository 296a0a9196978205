#pragma once

// Internal interface: other rooms include this header.

#include <torch/optim/optimizer.h>

#include <vector>

// States of LibTorch's optimizers. Other classes, such as Semitone's, are left alone.
namespace semitone {

// Converts the 16-bit tensors of a state to fp32: they have the dtype of the parameters that they
// were made for, and load() keeps it. Semitone's optimizers choose the dtypes of their states
// themselves.
void widen_state(torch::optim::OptimizerParamState& state);

// The tensors of a state that have one element for each of the parameter. Not LBFGS's, which has one
// state for all parameters.
std::vector<at::Tensor> elementwise_tensors(torch::optim::OptimizerParamState& state);

// Gives parameters without a state the one that Adagrad makes in its constructor. Its step needs one
// also where a file has none: FusedAdagrad's, for parameters that never had a gradient.
void add_initial_states(torch::optim::Optimizer& optimizer);

}  // namespace semitone
