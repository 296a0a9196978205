#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/ArrayRef.h>

namespace semitone {

// The arguments of an operator, for its start callback: RecordFunction::inputs(). Without NDEBUG
// that function asserts a member which exists only in a LibTorch that was compiled without NDEBUG
// too. LibTorch's releases are not, so that the assertion reads memory that nothing has set.
c10::ArrayRef<const c10::IValue> inputs_of(const at::RecordFunction& record);

}  // namespace semitone
