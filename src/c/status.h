#pragma once

#include "semitone/autocast/autocast.h"
#include "semitone/c/semitone.h"

#include <exception>
#include <utility>

namespace semitone::c {

// Keeps the message of an exception for semitone_last_error(). Returns its status.
SemitoneStatus note_error(const std::exception_ptr& error) noexcept;

// Runs the body of a function of the C interface: body(function), with the function's name for
// messages. No exception leaves it.
template <typename Body>
SemitoneStatus run(const char* function, Body&& body) noexcept {
  try {
    std::forward<Body>(body)(function);
    return SEMITONE_OK;
  } catch (...) {
    return note_error(std::current_exception());
  }
}

// run() for a body whose operators are not the caller's: the policy of a region of the caller would
// lower or ban them.
template <typename Body>
SemitoneStatus run_without_casts(const char* function, Body&& body) noexcept {
  return run(function, [&](const char* name) {
    const amp::DisableCasts as_outside;
    std::forward<Body>(body)(name);
  });
}

}  // namespace semitone::c
