#include "apps/semitone/commands.h"
#include "apps/semitone/exit_code.h"
#include "apps/semitone/flags.h"
#include "apps/semitone/help.h"
#include "semitone/core/error.h"
#include "semitone/core/version.h"
#include "src/train/diverged_elsewhere.h"

#include <c10/util/Exception.h>

#include <CLI/CLI.hpp>

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

// The command line, last word first, as CLI11 wants it. The data-parallel tutorials have an option
// -nr, which CLI11 would take for -n r.
std::vector<std::string> arguments_of(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  if (!words.empty() && words.front() == "train")
    std::replace(words.begin(), words.end(), std::string("-nr"), std::string("--nr"));
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
    app.parse(arguments_of(argc, argv));
  } catch (const CLI::ParseError& error) {
    // --help and --version come as such an error too.
    if (error.get_exit_code() != 0) throw cli::usage_error(app, error);
    app.exit(error);
    return cli::kSuccess;
  }
  return action();
}

int fail(const std::exception& error, int code) {
  std::cerr << error.what() << '\n';
  return code;
}

}  // namespace

int main(int argc, char** argv) {
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
