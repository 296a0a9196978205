#pragma once

#include <string>
#include <string_view>

namespace semitone {

// A text from a file or another process, for a terminal: each character that could change what the
// terminal shows is a question mark. These are control characters (also the 8-bit ones, U+0080 to
// U+009F in UTF-8), and those that change the direction of writing.
std::string printable(std::string_view text);

// The same, of several lines.
std::string printable_lines(std::string_view text);

}  // namespace semitone
