#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/ArrayRef.h>

namespace semitone {

// The arguments of an operator, for its start callback: RecordFunction::inputs(). Unless NDEBUG is
// defined, that function asserts a member that only a LibTorch built without NDEBUG sets. LibTorch's
// releases are built with NDEBUG, so the assertion would read uninitialised memory.
c10::ArrayRef<const c10::IValue> inputs_of(const at::RecordFunction& record);

}  // namespace semitone
