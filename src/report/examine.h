#pragma once

#include "src/report/frame.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>

// The rules of NonFiniteCheck. Called within a QuietScope, for tensors for which can_examine() holds.
namespace semitone::report {

// The first result of an operator that is not finite, and should be.
struct FirstNonFinite {
  at::Tensor result;                              // undefined: there is none
  std::string name;                               // of the result
  const WatchedArgument* from_outside = nullptr;  // the argument that had such values before
};

// A result of an operator that has just ended.
void examine_result(Frame& frame, const at::Tensor& result, const std::string& name,
                    FirstNonFinite& first);

// After the last result: keeps the finding or, within another operator, tells that one.
void conclude(Frame& frame, const FirstNonFinite& first);

// A gradient that a node of the graph is about to get, as its argument `position`.
void examine_gradient(const Frame& frame, const at::Tensor& gradient, std::size_t position);

// Whether a node of the graph is a custom function's.
bool is_custom_function(const torch::autograd::Node& node);

// After the last operator of a node: keeps what they made, if the node has returned it.
void conclude_node(Frame& frame);

}  // namespace semitone::report
