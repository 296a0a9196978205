// `semitone completion` and `semitone manual`: what an installation needs besides the program.

#include "apps/semitone/command_tree.h"
#include "apps/semitone/commands.h"
#include "apps/semitone/completion.h"
#include "apps/semitone/exit_code.h"
#include "apps/semitone/flags.h"
#include "apps/semitone/manual.h"
#include "semitone/core/version.h"

#include <algorithm>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

namespace semitone::cli {
namespace {

constexpr auto kCompletionFooter =
    R"(cmake --install puts the scripts where the shells look for them. Without it:

Examples:
  source <(semitone completion bash)
  semitone completion zsh > ~/.zfunc/_semitone
  semitone completion fish > ~/.config/fish/completions/semitone.fish

)";

constexpr auto kManualFooter =
    R"(cmake --install puts the pages where man looks for them. Without it:

Examples:
  semitone manual train | man -l -

)";

int print_completion(const CLI::App& app, const std::string& shell) {
  const auto commands = command_tree(app);
  if (shell == "bash") std::cout << bash_completion(commands);
  if (shell == "zsh") std::cout << zsh_completion(commands);
  if (shell == "fish") std::cout << fish_completion(commands);
  return kSuccess;
}

int print_manual(const CLI::App& app, const std::string& command) {
  const auto commands = command_tree(app);
  const auto found = std::find_if(commands.begin(), commands.end(),
                                  [&](const CommandEntry& one) { return one.name == command; });
  std::cout << manual_page(*found, commands, version());
  return kSuccess;
}

}  // namespace

void add_completion_command(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand(
      "completion", "Print a script that lets a shell complete commands and flags");
  const auto shell = std::make_shared<std::string>();
  Flags(command, "cli.completion").argument("shell", *shell, {"bash", "zsh", "fish"}, "The shell");
  command.footer(std::string(kCompletionFooter) + kExitCodesHelp);
  command.callback(
      [&app, &action, shell] { action = [&app, shell] { return print_completion(app, *shell); }; });
}

void add_manual_command(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand("manual", "Print the manual page of a command, for man");
  std::vector<std::string> names;
  for (const CommandEntry& entry : command_tree(app)) names.push_back(entry.name);
  const auto name = std::make_shared<std::string>();
  Flags(command, "cli.manual")
      .argument("command", *name, names, "The command, or semitone for the program itself");
  command.footer(std::string(kManualFooter) + kExitCodesHelp);
  command.callback(
      [&app, &action, name] { action = [&app, name] { return print_manual(app, *name); }; });
}

}  // namespace semitone::cli
