#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace semitone::amp {

// The indices of the names that match a glob (fnmatch). Error if none does, with a hint.
std::vector<std::size_t> matching(const std::string& glob, const std::vector<std::string>& names,
                                  std::string_view component);

}  // namespace semitone::amp
