#pragma once

// Internal interface: other rooms include this header.

#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// The names of operators in policies, messages and tables: ATen's without "aten::", with the
// overload after a dot.
namespace semitone::amp {

// "conv2d", "conv2d.padding", "mylib::my_op".
std::string display_name(const c10::OperatorName& name);

// The display name for a user's spelling: "conv2d" for "aten::conv2d".
std::string display_name(std::string_view name);

bool is_aten(const c10::OperatorName& name);

// The operator with exactly this display name ("conv2d": the overload without a name), or nothing
// if LibTorch does not have it.
std::optional<c10::OperatorHandle> find_operator(std::string_view name);

// All overloads of ATen's operators, by display name without the overload. Computed once: LibTorch
// has 3000 operators.
const std::map<std::string, std::vector<c10::OperatorHandle>>& aten_operators();

// The operators that a user's name stands for. "conv2d.padding" stands for this overload. "conv2d"
// stands for all overloads that write to no argument. If every overload writes to one ("exp_"), it
// stands for all of them. Error with the nearest names if there is no such operator.
std::vector<c10::OperatorHandle> resolve_operators(std::string_view name, std::string_view caller);

// Whether the operator writes to an argument: in-place forms and out= overloads.
bool writes_to_argument(const c10::OperatorHandle& op);

}  // namespace semitone::amp
