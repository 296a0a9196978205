#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace semitone {

// The number that the whole text is, if it is one: without spaces or a plus sign, and within the
// limits of the type. Does not depend on the locale.
template <typename Number>
std::optional<Number> parse_number(std::string_view text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

}  // namespace semitone
