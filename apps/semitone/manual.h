#pragma once

#include "apps/semitone/command_tree.h"

#include <string>
#include <vector>

namespace semitone::cli {

// A manual page of section 1 in man's format (man(7)): of a command, or of the program if it is the
// first of its commands.
std::string manual_page(const CommandEntry& command, const std::vector<CommandEntry>& commands,
                        const std::string& version);

}  // namespace semitone::cli
