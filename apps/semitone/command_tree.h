#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

// The commands of the program with their flags, as completion and manual pages show them.
namespace semitone::cli {

// What a flag takes.
enum class Value { none, optional_file, file, directory, choice, other };

struct FlagEntry {
  std::vector<std::string> names;  // "-n", "--nnodes"; of an argument without dashes "IN"
  std::string type;                // "N", "O0|O1|O2", "FILE", as in --help
  std::string fallback;            // the default; empty: none
  std::string help;
  Value value = Value::none;
  std::vector<std::string> choices;

  bool is_argument() const { return !names.front().starts_with('-'); }
};

struct CommandEntry {
  std::string name;
  std::string help;
  std::string footer;  // notes, examples and exit codes
  std::vector<FlagEntry> flags;
  bool runs_program = false;  // whose name and arguments come last
};

// The program itself comes first, then its commands in the order of --help.
std::vector<CommandEntry> command_tree(const CLI::App& app);

}  // namespace semitone::cli
