#pragma once

#include <CLI/CLI.hpp>

#include <map>
#include <string>

// The flags of `semitone train` in a file (config_lines.h): a line NAME=VALUE for each, without the
// dashes, at the beginning or in a section [train].
namespace semitone::cli {

// Sets the flags that the file has and the command line has not. FileError for a file that cannot
// be read or has more than 64 KiB, UsageError for what is no flag, occurs twice or has an invalid
// value.
void apply_config(CLI::App& command, const std::string& path);

// Returns such a file with the values of all flags that have one. Those that are defaults are
// comments. UsageError for a value that such a file cannot have.
std::string config_text(const CLI::App& command);

// Returns the flags that tell how a model is trained, without their dashes, and their values.
std::map<std::string, std::string> config_of(const CLI::App& command);

}  // namespace semitone::cli
