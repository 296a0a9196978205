#include "src/comm/watch_messages.h"

#include "src/core/parse_number.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace semitone::comm {

std::string_view next_word(std::string_view& line) {
  const auto end = line.find(' ');
  const std::string_view word = line.substr(0, end);
  line = end == std::string_view::npos ? std::string_view() : line.substr(end + 1);
  return word;
}

std::string format_ranks(const std::vector<int>& ranks) {
  return fmt::format("{}", fmt::join(ranks, ","));
}
std::vector<int> parse_ranks(std::string_view text) {
  std::vector<int> ranks;
  while (!text.empty()) {
    const auto end = text.find(',');
    if (const auto rank = parse_number<int>(text.substr(0, end))) ranks.push_back(*rank);
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  }
  return ranks;
}

std::string format_loss(const Watch::Loss& loss) {
  return format_ranks(loss.ranks) + ": " + loss.what;
}
Watch::Loss parse_loss(std::string_view text) {
  const auto colon = text.find(": ");
  if (colon == std::string_view::npos) return {};
  return {parse_ranks(text.substr(0, colon)), std::string(text.substr(colon + 2))};
}

}  // namespace semitone::comm
