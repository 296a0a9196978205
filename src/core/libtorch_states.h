#pragma once

// Internal interface: other rooms include this header.

#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

// States of LibTorch's optimizers. Other classes, such as Semitone's, are left alone.
namespace semitone {

// Converts the 16-bit tensors of a state to fp32: they have the dtype of the parameters that they
// were made for, and load() keeps it. Semitone's optimizers choose the dtypes of their states
// themselves.
void widen_state(torch::optim::OptimizerParamState& state);

// What load() of LibTorch's optimizers, which compares nothing but the number of parameters, does not
// notice: parameters that were one tensor in the saved run, of which one gets a null state, and states
// of other shapes than their parameters. The message names `component` and `whose` parameters they are.
void require_states_fit(torch::optim::Optimizer& optimizer, const std::string& component,
                        const std::string& whose);

// Gives a group these options, which are of its options' class, without making a new object: the
// program may hold a reference to the old one.
void assign_options(torch::optim::OptimizerParamGroup& group,
                    const torch::optim::OptimizerOptions& options);

// Gives parameters without a state the one that Adagrad makes in its constructor. Its step needs one
// also where a file has none: FusedAdagrad's, for parameters that never had a gradient.
void add_initial_states(torch::optim::Optimizer& optimizer);

}  // namespace semitone
