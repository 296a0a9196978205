#pragma once

#include "apps/semitone/command_tree.h"

#include <string>
#include <vector>

namespace semitone::cli {

// Scripts with which a shell completes the program's commands, flags and their values.
std::string bash_completion(const std::vector<CommandEntry>& commands);
std::string zsh_completion(const std::vector<CommandEntry>& commands);
std::string fish_completion(const std::vector<CommandEntry>& commands);

}  // namespace semitone::cli
