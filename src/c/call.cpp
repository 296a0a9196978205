#include "semitone/core/error.h"
#include "src/c/arguments.h"
#include "src/c/handles.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// Operators for callers that have no binding of LibTorch.

using namespace semitone::c;  // NOLINT(google-build-using-namespace)

namespace semitone::c {
namespace {

c10::OperatorHandle operator_of(const std::string& name, const char* function) {
  // "aten::add.Tensor": the overload follows the dot.
  const std::size_t dot = name.find('.');
  const c10::OperatorName full(name.substr(0, dot),
                               dot == std::string::npos ? "" : name.substr(dot + 1));
  const std::optional<c10::OperatorHandle> found = c10::Dispatcher::singleton().findSchema(full);
  if (!found.has_value()) {
    throw Error(function, "an operator of LibTorch like 'aten::add.Tensor'", "'" + name + "'",
                "give the namespace, and the overload where there are several");
  }
  return *found;
}

c10::IValue value_of(const SemitoneValue& value, const char* function) {
  const bool is_list = value.kind >= SEMITONE_VALUE_TENSORS && value.kind <= SEMITONE_VALUE_DOUBLES;
  if (is_list && value.count > 0) {
    require_pointer(value.value.tensors, "list of values", function);
    constexpr std::size_t kMost = PTRDIFF_MAX / sizeof(std::int64_t);
    if (value.count > kMost)
      throw Error(function, "a list that fits into memory",
                  std::to_string(value.count) + " values");
  }
  switch (value.kind) {
    case SEMITONE_VALUE_NONE:
      return {};
    case SEMITONE_VALUE_TENSOR:
      if (value.value.tensor == nullptr) return {};
      return *reinterpret_cast<const at::Tensor*>(value.value.tensor);
    case SEMITONE_VALUE_INT:
      return value.value.integer;
    case SEMITONE_VALUE_DOUBLE:
      return value.value.real;
    case SEMITONE_VALUE_BOOL:
      return value.value.integer != 0;
    case SEMITONE_VALUE_STRING:
      return string_of(value.value.string, "string", function);
    case SEMITONE_VALUE_TENSORS:
      return tensors_of(value.value.tensors, value.count, function);
    case SEMITONE_VALUE_INTS:
      return std::vector<int64_t>(value.value.integers, value.value.integers + value.count);
    case SEMITONE_VALUE_DOUBLES:
      return std::vector<double>(value.value.reals, value.value.reals + value.count);
    default:
      throw Error(function, "a kind of value, SEMITONE_VALUE_TENSOR …",
                  "the number " + std::to_string(value.kind));
  }
}

// A number for which LibTorch has an enumerator. It uses others as an index into its tables.
void require_enumerator(const c10::Argument& argument, const c10::IValue& value,
                        const char* function) {
  c10::TypePtr type = argument.real_type();
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  std::int64_t limit = 0;
  if (type->kind() == c10::TypeKind::ScalarTypeType)
    limit = static_cast<std::int64_t>(c10::ScalarType::NumOptions);
  if (type->kind() == c10::TypeKind::LayoutType)
    limit = static_cast<std::int64_t>(c10::Layout::NumOptions);
  if (type->kind() == c10::TypeKind::MemoryFormatType)
    limit = static_cast<std::int64_t>(c10::MemoryFormat::NumOptions);
  if (limit == 0 || !value.isInt()) return;
  if (value.toInt() < 0 || value.toInt() >= limit)
    throw Error(function, "a number of LibTorch's for '" + argument.name() + "'",
                std::to_string(value.toInt()));
}

std::vector<at::Tensor> tensors_in(const torch::jit::Stack& stack, const std::string& op,
                                   const char* function) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) {
      tensors.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      const std::vector<at::Tensor> list = value.toTensorVector();
      tensors.insert(tensors.end(), list.begin(), list.end());
    } else {
      throw Error(function, "an operator whose results are tensors",
                  "'" + op + "' with a result of type " + value.tagKind());
    }
  }
  return tensors;
}

}  // namespace
}  // namespace semitone::c

SemitoneStatus semitone_call(const char* op, const SemitoneValue* arguments, size_t argument_count,
                             SemitoneTensor** results, size_t capacity, size_t* count) {
  return run(__func__, [&](const char* function) {
    const std::string name = string_of(op, "name of an operator", function);
    if (argument_count > 0) require_pointer(arguments, "list of arguments", function);
    if (capacity > 0) require_pointer(results, "list for the results", function);
    const c10::OperatorHandle found = operator_of(name, function);
    torch::jit::Stack stack;
    for (std::size_t i = 0; i < argument_count; ++i)
      stack.push_back(value_of(arguments[i], function));
    const c10::FunctionSchema& schema = found.schema();
    schema.checkAndNormalizeInputs(stack, {});
    for (std::size_t i = 0; i < stack.size(); ++i)
      require_enumerator(schema.arguments()[i], stack[i], function);
    const auto require_capacity = [&](std::size_t needed) {
      if (capacity == 0 || needed <= capacity) return;
      throw semitone::Error(
          function, "space for the " + std::to_string(needed) + " results of '" + name + "'",
          "a capacity of " + std::to_string(capacity));
    };
    require_capacity(schema.returns().size());
    found.callBoxed(stack);
    std::vector<at::Tensor> tensors;
    if (capacity > 0) tensors = tensors_in(stack, name, function);
    require_capacity(tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i)
      results[i] = tensors[i].defined() ? new_tensor(tensors[i]) : nullptr;
    if (count != nullptr) *count = tensors.size();
  });
}
