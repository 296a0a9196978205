#pragma once

#include "semitone/report/nonfinite_finding.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <string>

// What a tensor or a number contains.
namespace semitone::report {

// Kinds of values that are not finite, as bits.
using Kinds = std::uint8_t;
inline constexpr Kinds kNan = 1;
inline constexpr Kinds kPositiveInf = 2;
inline constexpr Kinds kNegativeInf = 4;
inline constexpr Kinds kAllKinds = kNan | kPositiveInf | kNegativeInf;

// Whether a tensor can be looked at: floating or complex, with strides, with elements, and memory of
// its own kind rather than a wrapper's.
bool can_examine(const at::Tensor& tensor);

// The kinds of values in a tensor for which can_examine() holds. One fast pass if all are finite.
Kinds kinds_of(const at::Tensor& tensor);

// The kinds of a number among an operator's arguments; none for anything else.
Kinds kinds_of_number(const c10::IValue& value);

// Counts and range of a tensor for which can_examine() holds.
TensorValues values_of(const at::Tensor& tensor, const std::string& name);

// The operators that this room calls itself are not watched, traced, cast or differentiated on this
// thread as long as this object exists.
class QuietScope {
 private:
  at::DisableRecordFunctionGuard not_watched_;
  at::AutoDispatchBelowADInplaceOrView not_differentiated_;
  c10::impl::ExcludeDispatchKeyGuard not_cast_{c10::autocast_dispatch_keyset |
                                               c10::DispatchKeySet(c10::DispatchKey::Tracer)};
};

}  // namespace semitone::report
