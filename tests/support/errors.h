#pragma once

#include "semitone/core/error.h"

#include <gtest/gtest.h>

#include <exception>
#include <initializer_list>
#include <string>
#include <string_view>

namespace semitone::test {

// Returns the message of the E that a call raises, without a C++ stack trace. If it raises nothing
// or something else, the test fails and the result is empty.
template <typename E, typename Function>
std::string message_of(Function&& function) {
  try {
    function();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "expected another exception, got " << error.what();
    return {};
  }
  ADD_FAILURE() << "expected an exception, got none";
  return {};
}

template <typename Function>
std::string error_of(Function&& function) {
  return message_of<Error>(function);
}

// Checks that a call raises an Error whose message contains all these parts.
template <typename Function>
void expect_error(Function&& function, std::initializer_list<std::string_view> parts) {
  const std::string message = error_of(function);
  for (const std::string_view part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
  }
}

}  // namespace semitone::test
