#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

// The text of a file of flags, in the part of TOML that INI files have too.
namespace semitone::cli {

struct ConfigLine {
  std::string name;                  // without the section
  std::optional<std::string> value;  // without its quotes; none if the line is a name alone
};

// Reads lines of the forms NAME = VALUE and NAME, and comments. A comment is a line that begins
// with # or ;, or what follows a # after a space. A value is a word, or any text in single or
// double quotes, in which a backslash is an ordinary character. Names may follow the line
// [SECTION], or have the form SECTION.NAME. Throws UsageError of the component, with the number of
// the line, for anything else: other sections, lists, several words, control characters.
// @param section  the command: "train"
// @param where    the file, for messages
std::vector<ConfigLine> parse_config(std::string_view text, std::string_view section,
                                     const std::string& where, std::string_view component);

// Returns the value as such a file has it: in quotes, unless it is a number, true or false. Nothing
// if the file cannot have it: with control characters, or both kinds of quotes.
std::optional<std::string> to_config_value(const std::string& value);

}  // namespace semitone::cli
