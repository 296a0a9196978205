#include "src/report/operator_callbacks.h"

#include <algorithm>
#include <array>
#include <utility>

namespace semitone::report {
namespace {

struct Registered {
  OperatorCallbacks::Start start = nullptr;
  int count = 0;
  at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
};

// Not an object with a destructor: callbacks may end after the thread's objects.
Registered& registered(OperatorCallbacks::Start start) {
  constexpr std::size_t kFunctions = 3;  // NonFiniteCheck's, Recorder's and WhatIf's
  static thread_local std::array<Registered, kFunctions> of_this_thread;
  Registered* const found = std::find_if(
      of_this_thread.begin(), of_this_thread.end() - 1,
      [&](const Registered& entry) { return entry.start == start || entry.start == nullptr; });
  found->start = start;
  return *found;
}

// They are, if this thread works for one that watches.
bool has_callbacks(OperatorCallbacks::Start start) {
  const auto& callbacks = at::get_record_function_tls_().sorted_tls_callbacks_;
  return std::any_of(callbacks.begin(), callbacks.end(),
                     [&](const auto& entry) { return entry.callback_.start() == start; });
}

}  // namespace

OperatorCallbacks::OperatorCallbacks(Start start, End end) : start_(start) {
  if (registered(start).count++ > 0 || has_callbacks(start)) return;
  registered(start).handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(start, end)
          .needsInputs(true)
          .needsOutputs(true)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
}

OperatorCallbacks::~OperatorCallbacks() {
  if (abandoned_ || --registered(start_).count > 0) return;
  const auto handle = std::exchange(registered(start_).handle, at::INVALID_CALLBACK_HANDLE);
  if (handle != at::INVALID_CALLBACK_HANDLE) at::removeCallback(handle);
}

}  // namespace semitone::report
