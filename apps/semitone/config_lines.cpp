#include "apps/semitone/config_lines.h"

#include "apps/semitone/flags.h"
#include "src/core/parse_number.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace semitone::cli {
namespace {

constexpr std::string_view kBlanks = " \t\r";

std::string_view without_blanks(std::string_view text) {
  const auto first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

bool is_control(char letter) {
  return (static_cast<unsigned char>(letter) < ' ' && letter != '\t') || letter == '\x7f';
}

// Whether nothing follows, or a comment.
bool is_over(std::string_view rest) {
  rest = without_blanks(rest);
  return rest.empty() || rest.front() == '#';
}

class ConfigReader {
 public:
  ConfigReader(std::string_view section, const std::string& where, std::string_view component)
      : section_(section), where_(where), component_(component) {}

  void read(std::string_view line) {
    ++number_;
    line = without_blanks(line);
    if (line.empty() || line.front() == '#' || line.front() == ';') return;
    if (std::any_of(line.begin(), line.end(), is_control)) fail("no control characters", "one");
    if (line.front() == '[') return check_section(line);
    std::string_view name = line.substr(0, line.find_first_of("= \t"));
    const std::string_view rest = without_blanks(line.substr(name.size()));
    const bool is_alone = is_over(rest);
    if (name.empty() || name.find('#') != std::string_view::npos ||
        (!is_alone && rest.front() != '='))
      fail("NAME = VALUE", fmt::format("'{}'", line));
    std::optional<std::string> value;
    if (!is_alone) value = read_value(name, rest.substr(1));
    if (name.starts_with(section_) && name.substr(section_.size()).starts_with('.'))
      name.remove_prefix(section_.size() + 1);
    lines_.push_back({std::string(name), std::move(value)});
  }

  std::vector<ConfigLine> take_lines() { return std::move(lines_); }

 private:
  void check_section(std::string_view line) const {
    const auto end = line.find(']');
    const bool is_known = end != std::string_view::npos && is_over(line.substr(end + 1)) &&
                          without_blanks(line.substr(1, end - 1)) == section_;
    if (!is_known) fail(fmt::format("the section [{}]", section_), fmt::format("'{}'", line));
  }

  std::string read_value(std::string_view name, std::string_view text) const {
    text = without_blanks(text);
    if (is_over(text)) fail(fmt::format("a value for '{}'", name), "none");
    std::string_view value;
    bool is_one = false;
    if (text.front() == '"' || text.front() == '\'') {
      const auto end = text.find(text.front(), 1);
      value = text.substr(1, end - 1);
      is_one = end != std::string_view::npos && is_over(text.substr(end + 1));
    } else {
      value = text.substr(0, text.find_first_of(kBlanks));
      is_one = value.find_first_of("\"'#,[]{}") == std::string_view::npos &&
               is_over(text.substr(value.size()));
    }
    if (!is_one) {
      fail(fmt::format("one value for '{}'", name), fmt::format("'{}'", text),
           "a value that is more than a word needs quotes around it");
    }
    return std::string(value);
  }

  [[noreturn]] void fail(const std::string& expected, const std::string& got,
                         const std::string& remedy = {}) const {
    throw UsageError(component_, fmt::format("{} in line {} of '{}'", expected, number_, where_),
                     got, remedy);
  }

  std::string_view section_;
  const std::string& where_;
  std::string_view component_;
  int number_ = 0;
  std::vector<ConfigLine> lines_;
};

}  // namespace

std::vector<ConfigLine> parse_config(std::string_view text, std::string_view section,
                                     const std::string& where, std::string_view component) {
  ConfigReader reader(section, where, component);
  while (!text.empty()) {
    const auto end = std::min(text.find('\n'), text.size());
    reader.read(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return reader.take_lines();
}

std::optional<std::string> to_config_value(const std::string& value) {
  if (value == "true" || value == "false" || parse_number<double>(value).has_value()) return value;
  if (std::any_of(value.begin(), value.end(), is_control)) return std::nullopt;
  for (const char quote : {'"', '\''}) {
    if (value.find(quote) == std::string::npos) return quote + value + quote;
  }
  return std::nullopt;
}

}  // namespace semitone::cli
