#pragma once

#include <iosfwd>
#include <string>

// Where the program's words go, and how they look there.
namespace semitone::cli {

// Standard output, or standard error where standard output is for JSON ("-").
std::ostream& for_people(const std::string& json);

// Writes a JSON text where --json requested it; nothing if it was not given. FileError.
void write_json(const std::string& json, const std::string& text);

// Whether write_json will have a place to write to: before long work. FileError.
void require_json_writable(const std::string& json);

// Bold on a terminal, unless NO_COLOR is set.
std::string bold(const std::ostream& stream, const std::string& text);

// Width of the terminal behind standard output or standard error; 0 if there is none, or none that
// can draw a line again.
int terminal_columns(const std::ostream& stream);

}  // namespace semitone::cli
