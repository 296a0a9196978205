#pragma once

#include "semitone/core/map_tensors.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

/// Casts of the tensors that map_tensors finds.
namespace semitone::amp {

/// Returns a tensor in another floating dtype, recorded by autograd. Undefined, integer, bool and
/// complex tensors are returned unchanged, and so is fp64 unless wide is true.
at::Tensor cast_floating(const at::Tensor& tensor, c10::ScalarType dtype, bool wide = false);
/// Casts all tensors in an IValue: tensors, lists, tuples and dicts of them, nested. Other values
/// are returned unchanged.
c10::IValue cast_floating(const c10::IValue& value, c10::ScalarType dtype, bool wide = false);

}  // namespace semitone::amp
