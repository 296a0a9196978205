#pragma once

#include "semitone/core/map_tensors.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

/// Casting what map_tensors finds.
namespace semitone::amp {

/// A tensor in another floating dtype, recorded by autograd. Left alone: undefined, integer, bool
/// and complex tensors, and fp64 unless wide is true.
at::Tensor cast_floating(const at::Tensor& tensor, c10::ScalarType dtype, bool wide = false);
/// All tensors in an IValue: tensors, lists, tuples and dicts of them, nested. Anything else comes
/// back as it is.
c10::IValue cast_floating(const c10::IValue& value, c10::ScalarType dtype, bool wide = false);

}  // namespace semitone::amp
