#pragma once

#include "src/comm/watch.h"

#include <string>
#include <string_view>
#include <vector>

// The words of the watches' messages.
namespace semitone::comm {

// Removes the first word from a line and returns it.
std::string_view next_word(std::string_view& line);

// "1,3".
std::string format_ranks(const std::vector<int>& ranks);
std::vector<int> parse_ranks(std::string_view text);

// "1,3: its process has ended".
std::string format_loss(const Watch::Loss& loss);
Watch::Loss parse_loss(std::string_view text);

}  // namespace semitone::comm
