#include "apps/semitone/help.h"

#include "apps/semitone/output.h"

#include <algorithm>
#include <iostream>
#include <sstream>
#include <utility>

namespace semitone::cli {
namespace {

// Widths used without a terminal, or with one that is too narrow or too wide.
constexpr std::size_t kUsual = 80;
constexpr std::size_t kLeast = 30;
constexpr std::size_t kMost = 110;

// Column of a flag's description, if there is room next to its name for a few words.
constexpr std::size_t kSecondColumn = 30;
constexpr std::size_t kFewWords = 28;

std::size_t columns_of_help() {
  const auto columns = static_cast<std::size_t>(terminal_columns(std::cout));
  return columns == 0 ? kUsual : std::clamp(columns, kLeast, kMost);
}

std::string spaces(std::size_t count) {
  return std::string(count, ' ');
}

// The first letters of a word that is longer than a line, up to a separator if there is one.
std::size_t cut_of(std::string_view word, std::size_t room) {
  const std::size_t sign = word.substr(0, room).find_last_of("|/,=");
  return sign == word.npos || sign == 0 ? room : sign + 1;
}

// "  a command   description": in one line, or one below the other.
std::string wrapped_item(std::string_view line, std::size_t columns) {
  if (line.size() <= columns) return std::string(line);
  const std::size_t gap = line.find("   ", 2);
  const std::string_view command = line.substr(2, gap == line.npos ? gap : gap - 2);
  std::string text = "  ";
  // A shell continues the line after the backslash.
  const std::string lines = wrapped(command, columns - 4, 4);
  for (const char letter : lines)
    text += letter == '\n' ? std::string(" \\\n") : std::string{letter};
  if (gap == line.npos) return text;
  std::string_view comment = line.substr(gap);
  comment.remove_prefix(std::min(comment.find_first_not_of(' '), comment.size()));
  return text + "\n" + spaces(6) + wrapped(comment, columns, 6);
}

}  // namespace

std::string wrapped(std::string_view text, std::size_t columns, std::size_t indent) {
  std::istringstream words{std::string(text)};
  std::string result;
  std::size_t column = indent;
  for (std::string word; words >> word;) {
    if (column > indent && column + 1 + word.size() > columns) {
      result += "\n" + spaces(indent);
      column = indent;
    } else if (column > indent) {
      result += ' ';
      ++column;
    }
    for (; column + word.size() > columns && columns > column; column = indent) {
      const std::size_t cut = cut_of(word, columns - column);
      result += word.substr(0, cut) + "\n" + spaces(indent);
      word.erase(0, cut);
    }
    result += word;
    column += word.size();
  }
  return result;
}

std::string wrapped_footer(std::string_view footer, std::size_t columns) {
  std::string result;
  std::string paragraph;
  const auto end_paragraph = [&] {
    if (!paragraph.empty()) result += wrapped(paragraph, columns) + "\n";
    paragraph.clear();
  };
  std::istringstream lines{std::string(footer)};
  for (std::string line; std::getline(lines, line);) {
    const bool is_item = line.starts_with("  ");
    if (is_item || line.empty()) end_paragraph();
    if (is_item) {
      result += wrapped_item(line, columns) + "\n";
    } else if (line.empty()) {
      result += '\n';
    } else {
      paragraph += line + " ";
      // "Examples:"
      if (line.ends_with(':')) end_paragraph();
    }
  }
  end_paragraph();
  return result;
}

Help::Help() : columns_(columns_of_help()) {}

std::string Help::entry(const std::string& name, const std::string& text) const {
  const bool has_room = columns_ >= kSecondColumn + kFewWords;
  const std::size_t indent = has_room ? kSecondColumn : 6;
  std::string result = "  " + name;
  if (text.empty()) return result + "\n";
  if (has_room && result.size() + 2 <= kSecondColumn) {
    result += spaces(kSecondColumn - result.size());
  } else {
    result = "  " + wrapped(name, columns_, 6) + "\n" + spaces(indent);
  }
  return result + wrapped(text, columns_, indent) + "\n";
}

std::string Help::make_option(const CLI::Option* option, bool positional) const {
  return entry(make_option_name(option, positional) + make_option_opts(option),
               make_option_desc(option));
}

std::string Help::make_subcommand(const CLI::App* command) const {
  return entry(command->get_name(), command->get_description());
}

std::string Help::make_usage(const CLI::App* command, std::string name) const {
  return wrapped(CLI::Formatter::make_usage(command, std::move(name)), columns_, 2) + "\n";
}

std::string Help::make_description(const CLI::App* command) const {
  return wrapped(command->get_description(), columns_) + "\n";
}

std::string Help::make_footer(const CLI::App* command) const {
  return wrapped_footer(command->get_footer(), columns_);
}

}  // namespace semitone::cli
