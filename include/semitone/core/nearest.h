#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace semitone {

/// What a user may have meant by a name that is none: at most three of the candidates, the nearest
/// by edit distance first, as "'a', 'b' or 'c'". Empty if none is within a third of the name's
/// letters, or two.
std::string nearest(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace semitone
