#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <string_view>
#include <type_traits>

namespace semitone {

// LibTorch carries ThreadLocalDebugInfo to every thread that works for another one (autograd,
// at::launch, the JIT), as part of at::ThreadLocalState. It is a chain of (kind, object), searched
// by kind, so further kinds of ours ride along. Up to LibTorch 2.14 a kind is a number of an
// enumeration with a fixed underlying type, where values beyond LibTorch's own are well defined;
// since then it is the address of a name.
template <typename Kind = c10::DebugInfoKind>
constexpr Kind thread_state_kind(int number, const std::string_view* name) {
  if constexpr (std::is_enum_v<Kind>) {
    return static_cast<Kind>(number);
  } else {
    return Kind(name);
  }
}

inline constexpr std::string_view kEventsStateName = "semitone events";
inline constexpr std::string_view kAutocastStateName = "semitone autocast";
inline constexpr std::string_view kReplicaStateName = "semitone replica";
inline constexpr c10::DebugInfoKind kEventsState = thread_state_kind(200, &kEventsStateName);
inline constexpr c10::DebugInfoKind kAutocastState = thread_state_kind(201, &kAutocastStateName);
inline constexpr c10::DebugInfoKind kReplicaState = thread_state_kind(202, &kReplicaStateName);

}  // namespace semitone
