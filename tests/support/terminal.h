#pragma once

#include <functional>
#include <string>

namespace semitone::test {

// Runs a function in a new process on a terminal of its own, and returns what appears there. The
// process ends with the function's result, which must be 0.
std::string on_terminal(const std::function<int()>& run, int columns = 80);

}  // namespace semitone::test
