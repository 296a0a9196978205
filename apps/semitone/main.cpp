#include "apps/semitone/commands.h"
#include "apps/semitone/exit_code.h"
#include "apps/semitone/flags.h"
#include "apps/semitone/help.h"
#include "semitone/core/error.h"
#include "semitone/core/version.h"
#include "src/train/diverged_elsewhere.h"

#include <c10/util/Exception.h>

#include <CLI/CLI.hpp>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace semitone;

// Daemons may close standard streams. The next files or sockets to be opened would take their
// numbers, and get what is printed. Not for writing: who prints then still gets an error.
void open_standard_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(stream, F_GETFD) < 0) ::open("/dev/null", O_RDONLY);
  }
}

// The flags of a command that take a value as `--flag value`: the word after one is no flag.
bool takes_next_word(const CLI::App& command, const std::string& word) {
  if (!word.starts_with('-')) return false;
  const CLI::Option* const option = command.get_option_no_throw(word);
  return option != nullptr && option->get_items_expected_min() > 0;
}

// `--flag=` as two words, the second of them empty: otherwise CLI11 takes the next flag for the
// value. Words from the program of `semitone launch` on are not ours.
std::vector<std::string> with_empty_values(const CLI::App& app,
                                           const std::vector<std::string>& words) {
  if (words.empty()) return words;
  const auto commands = app.get_subcommands(
      [&](const CLI::App* command) { return command->get_name() == words.front(); });
  if (commands.empty()) return words;
  const bool runs_program = words.front() == "launch";
  std::vector<std::string> result{words.front()};
  auto word = words.begin() + 1;
  for (; word != words.end(); ++word) {
    if (runs_program && *word == "--") {  // as torchrun takes it
      ++word;
      break;
    }
    if (runs_program && !word->starts_with('-')) break;
    if (word->starts_with("--") && word->find('=') == word->size() - 1) {
      result.push_back(word->substr(0, word->size() - 1));
      result.emplace_back();
      continue;
    }
    result.push_back(*word);
    if (takes_next_word(*commands.front(), *word) && word + 1 != words.end())
      result.push_back(*++word);
  }
  result.insert(result.end(), word, words.end());
  return result;
}

// The command line, last word first, as CLI11 wants it. The data-parallel tutorials have an option
// -nr, which CLI11 would take for -n r.
std::vector<std::string> arguments_of(const CLI::App& app, int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  if (!words.empty() && words.front() == "train")
    std::replace(words.begin(), words.end(), std::string("-nr"), std::string("--nr"));
  words = with_empty_values(app, words);
  std::reverse(words.begin(), words.end());
  return words;
}

int run(int argc, char** argv) {
  CLI::App app("Mixed-precision training for C++ programs that use LibTorch.", "semitone");
  app.set_version_flag("--version", "semitone " + version() + " (LibTorch " + libtorch_version() +
                                        ", " + compiler() + ")");
  // Commands replace it.
  app.formatter(std::make_shared<cli::Help>());
  app.footer(cli::kExitCodesHelp);
  app.require_subcommand(1);
  cli::Action action;
  cli::add_train_command(app, action);
  cli::add_ops_command(app, action);
  cli::add_launch_command(app, action);
  cli::add_bench_command(app, action);
  cli::add_convert_command(app, action);
  cli::add_doctor_command(app, action);
  cli::add_tune_command(app, action);
  cli::add_whatif_command(app, action);
  cli::add_report_command(app, action);
  cli::add_completion_command(app, action);
  cli::add_manual_command(app, action);
  try {
    app.parse(arguments_of(app, argc, argv));
  } catch (const CLI::ParseError& error) {
    // --help and --version come as such an error too.
    if (error.get_exit_code() != 0) throw cli::usage_error(app, error);
    app.exit(error);
    return cli::kSuccess;
  }
  return action();
}

int fail(const std::exception& error, int code) {
  // In one write, so that lines of several processes do not mix.
  std::cerr << std::string(error.what()) + '\n';
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_streams();
  // If the parent ignores it, children would disappear before they can be waited for.
  std::signal(SIGCHLD, SIG_DFL);
  try {
    const int code = run(argc, argv);
    if (!std::cout.flush())
      throw FileError("cli", "to write to standard output", "an error", "is the disk full?");
    return code;
  } catch (const cli::UsageError& error) {
    return fail(error, cli::kUsage);
  } catch (const train::DivergedElsewhere&) {
    // Launchers name the process that ends first, which should be the one that says why.
    std::this_thread::sleep_for(std::chrono::seconds(1));
    return cli::kDiverged;
  } catch (const DivergedError& error) {
    return fail(error, cli::kDiverged);
  } catch (const CommError& error) {
    // Launchers name the process that ends first. End quickly, so that this is the lost process and
    // its message gives the reason; unloading LibTorch would take some 0.3 s.
    const int code = fail(error, cli::kFailure);
    std::this_thread::sleep_for(std::chrono::seconds(1));
    return code;
  } catch (const c10::Error& error) {
    std::cerr << "[libtorch] " << error.what_without_backtrace() << '\n';
  } catch (const std::exception& error) {
    return fail(error, cli::kFailure);
  }
  return cli::kFailure;
}
