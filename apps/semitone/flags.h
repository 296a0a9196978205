#pragma once

#include "semitone/core/error.h"
#include "semitone/launch/launch_options.h"
#include "src/core/named_rows.h"

#include <CLI/CLI.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace semitone::cli {

// The command line is invalid: exit code 2.
class UsageError : public Error {
 public:
  using Error::Error;
  // Wraps the library's error about a value from the command line.
  explicit UsageError(const Error& error) : Error(error) {}
};

// Sets how many threads LibTorch computes with, at most the machine's cores, since more would wait
// for each other; 0: leaves it as it is. UsageError.
void set_threads(std::int64_t threads, const std::string& component);

// Adds flags to a command, each with one clear message for an invalid value:
// "[cli.train] expected --epochs from 1 to 1000000, got 'three'". Parsing sets the variables; their
// values before that are shown as the defaults.
class Flags {
 public:
  // Stores a valid text.
  using Set = std::function<void(const std::string&)>;

  // @param component  "cli.train"
  Flags(CLI::App& command, std::string component)
      : command_(command), component_(std::move(component)) {}

  // From now on --some-flag is --some_flag too, as in torchrun.
  void accept_underscores();

  void integer(const std::string& name, std::int64_t& variable, std::int64_t least,
               std::int64_t most, const std::string& help);
  // @param expected  the requirement: "above 0"
  void number(const std::string& name, double& variable, const std::function<bool(double)>& check,
              const std::string& expected, const std::string& help);
  void choice(const std::string& name, std::string& variable,
              const std::vector<std::string>& choices, const std::string& help);
  // Calls set with the choice. The default is the caller's.
  void choice(const std::string& name, const std::string& fallback,
              const std::vector<std::string>& choices, const Set& set, const std::string& help);
  // A required argument without dashes.
  void argument(const std::string& name, std::string& variable,
                const std::vector<std::string>& choices, const std::string& help);
  // @param type  what to show in --help: "FILE". The text may not be empty.
  void text(const std::string& name, std::string& variable, const std::string& type,
            const std::string& help);
  void text(const std::string& name, const std::string& type, const Set& set,
            const std::string& help);
  // @param check  whether a text is one of those that type lists
  void text(const std::string& name, std::string& variable, const std::string& type,
            const std::function<bool(const std::string&)>& check, const std::string& help);
  // Calls take, which stores a valid text and returns false for an invalid one.
  // @param fallback  the default, for --help
  // @param expected  the requirement: "to be a number of steps"
  void parsed(const std::string& name, const std::string& type, const std::string& fallback,
              const std::function<bool(const std::string&)>& take, const std::string& expected,
              const std::string& help);
  // Calls set with a number above 0, or with one of the words. The first is the default.
  void number_or_word(const std::string& name, const std::vector<std::string>& words,
                      const Set& set, const std::string& help);
  // Whether the flag was given.
  void mark(const std::string& name, bool& variable, const std::string& help);
  // --json [FILE]: empty if not given, "-" for standard output.
  void json(std::string& variable);
  // --name [FILE]: empty if not given, the fallback without a file.
  void optional_file(const std::string& name, std::string& variable, const std::string& fallback,
                     const std::string& help);

 private:
  using Remedy = std::function<std::string(const std::string&)>;

  // @param take    stores the text; false if it is invalid
  // @param remedy  for an invalid text; may be empty
  CLI::Option& add(const std::string& name, const std::string& type, const std::string& fallback,
                   const std::function<bool(const std::string&)>& take, const std::string& expected,
                   const std::string& help, const Remedy& remedy = {});

  CLI::Option& one_of(const std::string& name, const std::string& fallback,
                      const std::vector<std::string>& choices, const Set& set,
                      const std::string& help);

  // The name with its other spellings, in CLI11's syntax.
  std::string spellings(const std::string& name) const;

  CLI::App& command_;
  std::string component_;
  bool underscores_ = false;
};

// For an unknown flag: "did you mean '--epochs'?", or else where to look.
std::string remedy_for_flag(const CLI::App& command, const std::string& flag);

// Sets the address and port of node 0 from the flags. For several nodes, MASTER_ADDR and
// MASTER_PORT of the environment complete them, as scripts export these for the processes
// themselves.
void set_master(launch::LaunchOptions& options, const std::string& addr, std::int64_t port,
                const std::string& component);

// The secret of a job's launchers: the words of the file, or of SEMITONE_RDZV_TOKEN if there is no
// file; empty: none. FileError if the file cannot be read or is empty.
std::string rdzv_token(const std::string& file, const std::string& component);

// Converts an error of CLI11 to this program's form.
UsageError usage_error(const CLI::App& app, const CLI::ParseError& error);

}  // namespace semitone::cli
