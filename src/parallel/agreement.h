#pragma once

#include "semitone/comm/group.h"

#include <string>
#include <string_view>
#include <vector>

namespace semitone::parallel {

// What has to be equal on all ranks; no tabs and line breaks in it.
struct Property {
  std::string name;   // "parameter 'fc.weight'"
  std::string value;  // "float32[3, 4]"
};

// The parts of the Error that do not depend on what differs.
struct Disagreement {
  std::string_view where;
  std::string_view expected;
  std::string_view remedy;
};

// Error on every rank, which names ranks and their differences, unless all have rank 0's properties
// in rank 0's order. A problem that a rank has found by itself is told to all in the same way.
void require_agreement(const std::vector<Property>& mine, std::string problem,
                       const comm::Group& group, const Disagreement& error);

// "float32[3, 4]": a tensor's dtype and shape, and, where it is not contiguous, its strides. Two
// tensors of the same text lie in memory in the same way.
std::string describe_layout(const at::Tensor& tensor);

// What is wrong with a tensor that the group has to send; empty if nothing is.
std::string unfit_to_send(const at::Tensor& tensor, const std::string& name,
                          const comm::Group& group);

}  // namespace semitone::parallel
