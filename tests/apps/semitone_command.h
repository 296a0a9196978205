#pragma once

#include "src/launch/process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

// Runs the program `semitone`, whose path is SEMITONE_PROGRAM, as a user does.
namespace semitone::test {

using Words = std::vector<std::string>;

// The program with these arguments, and its output captured.
inline launch::ProcessOptions semitone_command(const Words& arguments) {
  return launch::ProcessOptions(SEMITONE_PROGRAM)
      .arguments(arguments)
      .out(launch::Output::capture)
      .err(launch::Output::capture);
}

inline launch::ProcessResult run_semitone(const Words& arguments) {
  return launch::run(semitone_command(arguments));
}

inline Words lines_of(const std::string& text) {
  std::istringstream stream(text);
  Words lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// Checks that the program failed with an exit code and a message, and wrote nothing else.
inline void expect_failure(const launch::ProcessResult& finished, int code,
                           const std::string& message) {
  EXPECT_EQ(finished.status.code, code) << finished.err;
  EXPECT_EQ(finished.status.signal, 0);
  EXPECT_THAT(finished.err, testing::HasSubstr(message));
  EXPECT_EQ(finished.out, "");
}

}  // namespace semitone::test
