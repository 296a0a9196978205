#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace semitone::launch {

// The number that the whole text is, if it is one.
inline std::optional<int> parse_number(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace semitone::launch
