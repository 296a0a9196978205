#pragma once

#include <exception>
#include <string>
#include <vector>

namespace semitone::comm {

// "rank 2", "ranks 1, 3": for messages.
std::string name_ranks(const std::vector<int>& ranks);

// The message of an exception, without LibTorch's backtrace.
std::string what_of(const std::exception_ptr& error);

// "2 s", "0.5 s".
std::string seconds(double value);

}  // namespace semitone::comm
