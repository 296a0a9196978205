#pragma once

#include "semitone/comm/group.h"

#include <string>
#include <string_view>
#include <vector>

namespace semitone::parallel {

// A property that must be equal on all ranks; without tabs and line breaks.
struct Property {
  std::string name;   // "parameter 'fc.weight'"
  std::string value;  // "float32[3, 4]"
};

// The parts of the Error that do not depend on the difference.
struct Disagreement {
  std::string_view component;
  std::string_view expected;
  std::string_view remedy;
};

// Unless all ranks have rank 0's properties in rank 0's order: Error on every rank, naming ranks
// and differences. A problem that one rank has found itself is reported to all in the same way.
void require_agreement(const std::vector<Property>& mine, std::string problem,
                       const comm::Group& group, const Disagreement& error);

// "float32[3, 4]": a tensor's dtype and shape and, unless it is contiguous, its strides. Two
// tensors with the same string have the same memory layout.
std::string describe_layout(const at::Tensor& tensor);

// The reason why the group cannot send a tensor; empty if it can.
std::string unfit_to_send(const at::Tensor& tensor, const std::string& name,
                          const comm::Group& group);

}  // namespace semitone::parallel
