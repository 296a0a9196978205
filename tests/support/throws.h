#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace semitone::test {

// Runs something that must throw an E, and returns the message.
template <typename E, typename Run>
std::string message_of(Run&& run) {
  try {
    run();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return {};
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

}  // namespace semitone::test
