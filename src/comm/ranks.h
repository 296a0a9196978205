#pragma once

#include <string>
#include <vector>

namespace semitone::comm {

// "rank 2", "ranks 1, 3": for messages.
std::string name_ranks(const std::vector<int>& ranks);

// "2 s", "0.5 s".
std::string seconds(double value);

}  // namespace semitone::comm
