#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

namespace semitone {

// LibTorch carries ThreadLocalDebugInfo to every thread that works for another one (autograd,
// at::launch, the JIT), as part of at::ThreadLocalState. It is a chain of (kind, object), searched
// by kind, so further kinds of ours ride along. The enumeration has a fixed underlying type: values
// beyond LibTorch's own are well defined.
inline constexpr auto kEventsState = static_cast<c10::DebugInfoKind>(200);
inline constexpr auto kAutocastState = static_cast<c10::DebugInfoKind>(201);

}  // namespace semitone
