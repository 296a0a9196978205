#pragma once

#include "src/comm/machine.h"

#include <string>
#include <string_view>
#include <vector>

namespace semitone::comm {

// What a rank tells the others at the rendezvous.
struct Introduction {
  std::string world_size;
  std::string backend;      // its name
  std::string check_level;  // as SEMITONE_COMM_CHECK has it
  Machine machine;
};

// The fields as words, for sending. Any text can be parsed; words that it lacks are empty.
std::string to_string(const Introduction& introduction);
Introduction parse_introduction(std::string_view text);

// CommError that names the ranks whose world size, backend or check level differs from this rank's,
// and their values. Ranks with different backends would not connect, and those of a higher check
// level would wait for comparisons that the others do not make.
// @param own  this rank's
// @param ranks  every rank's
void require_equal_settings(const Introduction& own, const std::vector<Introduction>& ranks);

}  // namespace semitone::comm
