#pragma once

#include <ATen/record_function.h>

#include <cstddef>
#include <string>
#include <vector>

namespace semitone::report {

// What the check knows about an operator from its schema.
struct OperatorInfo {
  std::string name;  // "div.Tensor", "mylib::op"
  std::vector<std::string> arguments;
  // Positions of the arguments that it writes to.
  std::vector<std::size_t> written;
  // Those of them whose earlier values do not matter: out= arguments, and self of copy_ and the
  // like.
  std::vector<std::size_t> overwritten;
  // Positions of the returned values that may be new tensors: neither views nor arguments.
  std::vector<std::size_t> results;
  std::size_t returns = 0;
  // It is made of other operators, unless autocast replaces it.
  bool is_composite = false;
  // Each element of its results is made of one element of each argument, after broadcasting.
  bool is_pointwise = false;

  bool writes(std::size_t argument) const;
  bool overwrites(std::size_t argument) const;
};

// The operator of a record; null if it is no operator. Lives as long as the process.
const OperatorInfo* operator_of(const at::RecordFunction& record);

// "div.Tensor" for "aten::div.Tensor".
std::string without_aten(std::string name);

// "div" for "div.Tensor".
std::string without_overload(const std::string& name);

}  // namespace semitone::report
