#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace semitone {

// Suggests names for one that does not exist: at most three of the candidates, nearest by edit
// distance first, as "'a', 'b' or 'c'". Empty if no candidate is within two edits or a third of
// the name's length.
std::string nearest(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace semitone
