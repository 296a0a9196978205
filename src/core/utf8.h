#pragma once

#include <cstddef>
#include <string_view>

namespace semitone {

// The bytes of the UTF-8 character (RFC 3629) that a text begins with; 0 if it begins with none.
std::size_t utf8_length(std::string_view text);

bool is_utf8(std::string_view text);

}  // namespace semitone
