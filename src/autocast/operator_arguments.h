#pragma once

#include "semitone/core/dtype.h"
#include "src/autocast/caster.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

// The tensors on the stack of a boxed call.
namespace semitone::amp {

// The tensors among an operator's arguments, those in lists included.
template <typename Visit>
void for_each_tensor(std::span<const c10::IValue> arguments, Visit&& visit) {
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor()) {
      visit(argument.toTensor());
    } else if (argument.isTensorList()) {
      for (const at::Tensor& tensor : argument.toTensorVector()) visit(tensor);
    }
  }
}

// Replaces the tensors among the arguments by convert(tensor).
template <typename Convert>
void replace_tensors(std::span<c10::IValue> arguments, Convert&& convert) {
  for (c10::IValue& argument : arguments) {
    if (argument.isTensor()) {
      const at::Tensor& before = argument.toTensor();
      if (!before.defined()) continue;
      at::Tensor after = convert(before);
      if (!after.is_same(before)) argument = std::move(after);
    } else if (argument.isTensorList()) {
      // A new list: the caller's own list must not change.
      c10::List<at::Tensor> converted;
      const auto tensors = argument.toTensorVector();
      converted.reserve(tensors.size());
      for (const at::Tensor& tensor : tensors)
        converted.push_back(tensor.defined() ? convert(tensor) : tensor);
      argument = std::move(converted);
    }
  }
}

// The common properties of the eligible arguments of a call.
struct Dtypes {
  Dtypes(std::span<const c10::IValue> arguments, c10::DeviceType device) {
    for_each_tensor(arguments, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.is_floating_point()) return;
      if (!is_eligible(tensor, device)) {
        foreign = true;
      } else {
        fp32 = fp32 || tensor.scalar_type() == at::kFloat;
        fp16 = fp16 || tensor.scalar_type() == at::kHalf;
        bf16 = bf16 || tensor.scalar_type() == at::kBFloat16;
      }
    });
  }

  // fp16 and bf16 each represent numbers that the other cannot; only fp32 represents both.
  c10::ScalarType widest() const {
    if (fp32 || (fp16 && bf16)) return at::kFloat;
    return fp16 ? at::kHalf : bf16 ? at::kBFloat16 : c10::ScalarType::Undefined;
  }
  // The one 16-bit dtype of all floating-point arguments.
  std::optional<c10::ScalarType> common_16bit() const {
    const auto dtype = widest();
    return !foreign && is_16bit(dtype) ? std::optional(dtype) : std::nullopt;
  }

  // The one 16-bit dtype that occurs together with fp32.
  std::optional<c10::ScalarType> mixed_16bit() const {
    if (foreign || !fp32 || fp16 == bf16) return std::nullopt;
    return fp16 ? at::kHalf : at::kBFloat16;
  }

  bool fp32 = false;
  bool fp16 = false;
  bool bf16 = false;
  bool foreign = false;  // fp64, fp8, or on another device
};

// Whether an argument is sparse: LibTorch's CPU kernels of sparse products know fp32 and fp64.
inline bool has_sparse(std::span<const c10::IValue> arguments) {
  return std::any_of(arguments.begin(), arguments.end(), [](const c10::IValue& argument) {
    return argument.isTensor() && argument.toTensor().defined() &&
           argument.toTensor().layout() != at::kStrided;
  });
}

}  // namespace semitone::amp
