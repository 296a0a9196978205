#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <functional>
#include <memory>
#include <string_view>
#include <type_traits>

namespace semitone {

// LibTorch carries ThreadLocalDebugInfo to every thread that works for another one (autograd,
// at::launch, the JIT), as part of at::ThreadLocalState. It is a chain of (kind, object), searched
// by kind, so that Semitone can add kinds. Up to LibTorch 2.14 a kind is a value of an enumeration
// with a fixed underlying type, which may have values beyond LibTorch's own. Since then it is the
// address of a name.
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

// Installs an object on this thread until destroyed, as c10::DebugInfoGuard does, with two
// differences.
//
// The object is placed below a profiler's state. LibTorch's profilers put their state on top of the
// chain when they start, and raise an error unless it is on top when they stop. A scope that begins
// or ends in between must not change that.
//
// Guards may end in another order than the reverse of their construction. The chain is then as if
// the guard that ends had never been constructed.
class ThreadStateGuard {
 public:
  // Returns the object to install. Its argument is the object of the same kind that was in force
  // before, or null.
  using Make = std::function<std::shared_ptr<c10::DebugInfoBase>(const c10::DebugInfoBase* outer)>;

  enum class End {
    in_order,
    out_of_order,  // guards that were constructed later are alive
    elsewhere,     // on another thread: no chain has changed, and the object stays in force
  };

  ThreadStateGuard(c10::DebugInfoKind kind, Make make);
  ~ThreadStateGuard();
  ThreadStateGuard(const ThreadStateGuard&) = delete;
  ThreadStateGuard& operator=(const ThreadStateGuard&) = delete;

  // Does the destructor's work, and returns what was irregular.
  End end();

 private:
  struct Link;
  Link* link_;  // null: ended
};

}  // namespace semitone
