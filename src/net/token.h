#pragma once

#include <cstddef>
#include <string_view>

namespace semitone::net {

// Whether two tokens are the same, in a time that says nothing about where they differ.
inline bool are_equal(std::string_view one, std::string_view other) {
  if (one.size() != other.size()) return false;
  int difference = 0;
  for (std::size_t i = 0; i < one.size(); ++i) difference |= one[i] ^ other[i];
  return difference == 0;
}

}  // namespace semitone::net
