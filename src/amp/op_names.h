#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// Operators by the names that policies, messages and tables use: ATen's without "aten::", the
// overload after a dot.
namespace semitone::amp {

// "conv2d", "conv2d.padding", "mylib::my_op".
std::string display_name(const c10::OperatorName& name);

// The display name of what a user calls an operator: "aten::conv2d" is "conv2d".
std::string display_name(std::string_view name);

bool is_aten(const c10::OperatorName& name);

// The operator with exactly this display name ("conv2d": the overload without a name), if LibTorch
// has it.
std::optional<c10::OperatorHandle> find_operator(std::string_view name);

// All overloads of ATen's operators, by display name without the overload. Looked up once: LibTorch
// has 3000 operators.
const std::map<std::string, std::vector<c10::OperatorHandle>>& aten_operators();

// What a user means by a name: one overload if one is named, else all overloads that write to no
// argument (all overloads if there are only such: "exp_"). Error with the nearest names if there is
// none.
std::vector<c10::OperatorHandle> resolve_operators(std::string_view name, std::string_view caller);

// Whether the operator writes to an argument: in-place forms and out= overloads.
bool writes_to_argument(const c10::OperatorHandle& op);

}  // namespace semitone::amp
