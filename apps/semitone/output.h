#pragma once

#include <filesystem>
#include <iosfwd>
#include <string>
#include <string_view>

// Destinations and formats of the program's output.
namespace semitone::cli {

// Standard output, or standard error if standard output is for JSON ("-").
std::ostream& human_output(const std::string& json);

// Writes a JSON text to the destination of --json, or nothing without --json. FileError.
void write_json(const std::string& json, const std::string& text);

// FileError unless write_json will be able to write. Call it before long work.
void require_json_writable(const std::string& json);

// A flag that names a file; an empty path: not given.
struct FlagOfFile {
  std::string_view flag;
  std::filesystem::path path;
};

// An absolute path without links, which equals another one if both lead to the same place.
std::filesystem::path place_of(const std::filesystem::path& path);

// UsageError if both are the same file.
void require_two_files(std::string_view component, const FlagOfFile& one, const FlagOfFile& other);

// Bold on a terminal, unless NO_COLOR is set.
std::string bold(const std::ostream& stream, const std::string& text);

// Width of the terminal at standard output or standard error; 0 if there is none, or none that can
// redraw a line.
int terminal_columns(const std::ostream& stream);

}  // namespace semitone::cli
