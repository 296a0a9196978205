#include "src/core/printable.h"

#include <cstddef>

namespace semitone {
namespace {

bool is_between(char letter, unsigned first, unsigned last) {
  const auto code = static_cast<unsigned char>(letter);
  return code >= first && code <= last;
}

// The bytes of the control character that a text begins with; 0 if it begins with another one.
std::size_t control_size(std::string_view text) {
  if (is_between(text[0], 0, 0x1f) || text[0] == 0x7f) return 1;
  if (text.size() >= 2 && text[0] == '\xc2' && is_between(text[1], 0x80, 0x9f)) return 2;
  const std::string_view start = text.substr(0, 2);
  const bool changes_direction =
      text.size() >= 3 && ((start == "\xe2\x80" && is_between(text[2], 0xaa, 0xae)) ||
                           (start == "\xe2\x81" && is_between(text[2], 0xa6, 0xa9)));
  return changes_direction ? 3 : 0;
}

std::string without_controls(std::string_view text, bool keep_lines) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const std::size_t control = keep_lines && text[0] == '\n' ? 0 : control_size(text);
    result += control > 0 ? '?' : text[0];
    text.remove_prefix(control > 0 ? control : 1);
  }
  return result;
}

}  // namespace

std::string printable(std::string_view text) {
  return without_controls(text, /*keep_lines=*/false);
}

std::string printable_lines(std::string_view text) {
  return without_controls(text, /*keep_lines=*/true);
}

}  // namespace semitone
