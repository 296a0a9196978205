#include "apps/semitone/completion.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <iterator>

namespace semitone::cli {
namespace {

std::string replaced(const std::string& text, char letter, std::string_view by) {
  std::string result;
  for (const char one : text) {
    if (one == letter) {
      result += by;
    } else {
      result += one;
    }
  }
  return result;
}

// The first sentence or clause, as a shell shows it beside a flag.
std::string short_help(const std::string& help) {
  constexpr std::size_t kMost = 70;
  std::string text = help.substr(0, help.find_first_of(";:\n"));
  if (const auto sentence = text.find(". "); sentence != text.npos) text.resize(sentence);
  if (text.size() <= kMost) return text;
  return text.substr(0, text.rfind(' ', kMost)) + " …";
}

std::vector<CommandEntry> without_program(const std::vector<CommandEntry>& commands) {
  return {std::next(commands.begin()), commands.end()};
}

std::string command_names(const std::vector<CommandEntry>& commands) {
  std::vector<std::string> names;
  names.reserve(commands.size());
  for (const CommandEntry& command : commands) names.push_back(command.name);
  return fmt::format("{}", fmt::join(names, " "));
}

// What bash offers for a value.
std::string bash_values(const FlagEntry& flag) {
  switch (flag.value) {
    case Value::file:
    case Value::optional_file:
      return "compgen -f -- \"$word\"";
    case Value::directory:
      return "compgen -d -- \"$word\"";
    case Value::choice:
      return fmt::format("compgen -W '{}' -- \"$word\"", fmt::join(flag.choices, " "));
    case Value::none:
    case Value::other:
      break;
  }
  return ":";  // nothing
}

// A branch for one command: its values after a flag, otherwise its flags or arguments.
std::string bash_branch(const CommandEntry& command) {
  std::string values;
  std::string flags;
  std::string arguments = "compgen -f -- \"$word\"";
  for (const FlagEntry& flag : command.flags) {
    if (flag.is_argument()) {
      if (flag.value == Value::choice) arguments = bash_values(flag);
      continue;
    }
    for (const std::string& name : flag.names) flags += " " + name;
    if (flag.value != Value::none)
      values += fmt::format("        {}) values=\"$({})\" ;;\n", fmt::join(flag.names, "|"),
                            bash_values(flag));
  }
  return fmt::format(
      "    {})\n"
      "      case $previous in\n"
      "{}"
      "        *)\n"
      "          case $word in\n"
      "            -*) values=\"$(compgen -W '{}' -- \"$word\")\" ;;\n"
      "            *) values=\"$({})\" ;;\n"
      "          esac ;;\n"
      "      esac ;;\n",
      command.name, values, flags.empty() ? flags : flags.substr(1), arguments);
}

// Within single quotes of zsh's _arguments, where [ and : have meanings too.
std::string zsh_text(const std::string& text) {
  std::string result = replaced(replaced(short_help(text), '\'', "'\\''"), '[', "\\[");
  return replaced(replaced(result, ']', "\\]"), ':', "\\:");
}

std::string zsh_value(const FlagEntry& flag) {
  switch (flag.value) {
    case Value::none:
      return "";
    case Value::file:
      return ":file:_files";
    case Value::optional_file:
      return "::file:_files";
    case Value::directory:
      return ":directory:_files -/";
    case Value::choice:
      return fmt::format(":value:({})", fmt::join(flag.choices, " "));
    case Value::other:
      break;
  }
  return ":value: ";
}

std::string zsh_branch(const CommandEntry& command) {
  std::string specs;
  bool has_arguments = false;
  for (const FlagEntry& flag : command.flags) {
    if (flag.is_argument()) {
      has_arguments = true;
      specs += fmt::format(" \\\n        ':{}{}'", zsh_text(flag.names.front()),
                           flag.value == Value::choice
                               ? fmt::format(":({})", fmt::join(flag.choices, " "))
                               : ":_files");
      continue;
    }
    for (const std::string& name : flag.names)
      specs += fmt::format(" \\\n        '{}[{}]{}'", name, zsh_text(flag.help), zsh_value(flag));
  }
  if (!has_arguments) specs += " \\\n        '*:file:_files'";
  return fmt::format("      {})\n        _arguments{} ;;\n", command.name, specs);
}

std::string fish_text(const std::string& text) {
  return "'" + replaced(replaced(short_help(text), '\\', "\\\\"), '\'', "\\'") + "'";
}

std::string fish_value(const FlagEntry& flag) {
  switch (flag.value) {
    case Value::none:
    case Value::optional_file:
      return "";
    case Value::file:
      return " -r -F";
    case Value::directory:
      return " -x -a '(__fish_complete_directories)'";
    case Value::choice:
      return fmt::format(" -x -a '{}'", fmt::join(flag.choices, " "));
    case Value::other:
      break;
  }
  return " -x";
}

std::string fish_lines(const CommandEntry& command, const std::string& condition) {
  std::string lines;
  for (const FlagEntry& flag : command.flags) {
    if (flag.is_argument()) {
      if (flag.value == Value::choice)
        lines += fmt::format("complete -c semitone -n '{}' -f -a '{}' -d {}\n", condition,
                             fmt::join(flag.choices, " "), fish_text(flag.help));
      continue;
    }
    std::string names;
    for (const std::string& name : flag.names) {
      if (name.starts_with("--")) {
        names += " -l " + name.substr(2);
      } else {
        names += (name.size() == 2 ? " -s " : " -o ") + name.substr(1);
      }
    }
    lines += fmt::format("complete -c semitone -n '{}'{}{} -d {}\n", condition, names,
                         fish_value(flag), fish_text(flag.help));
  }
  return lines;
}

}  // namespace

std::string bash_completion(const std::vector<CommandEntry>& commands) {
  const auto own = without_program(commands);
  std::string flags;
  for (const FlagEntry& flag : commands.front().flags)
    flags += fmt::format(" {}", fmt::join(flag.names, " "));
  std::string branches;
  for (const CommandEntry& command : own) branches += bash_branch(command);
  return fmt::format(
      R"sh(# bash completion for semitone                           -*- shell-script -*-

_semitone() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} values=
  # bash takes --flag=value for three words.
  if [[ $word == = ]]; then
    word=
  elif [[ $previous == = ]]; then
    previous=${{COMP_WORDS[COMP_CWORD-2]}}
  fi
  if ((COMP_CWORD == 1)); then
    values="$(compgen -W '{}{}' -- "$word")"
    mapfile -t COMPREPLY <<< "$values"
    return
  fi
  case ${{COMP_WORDS[1]}} in
{}  esac
  if [[ -n $values ]]; then
    compopt -o filenames 2> /dev/null
    mapfile -t COMPREPLY <<< "$values"
  fi
}}

complete -F _semitone semitone
)sh",
      command_names(own), flags, branches);
}

std::string zsh_completion(const std::vector<CommandEntry>& commands) {
  const auto own = without_program(commands);
  std::string names;
  std::string branches;
  for (const CommandEntry& command : own) {
    names += fmt::format("    '{}:{}'\n", command.name, zsh_text(command.help));
    branches += zsh_branch(command);
  }
  return fmt::format(
      R"sh(#compdef semitone

_semitone() {{
  local context state state_descr line
  typeset -A opt_args
  local -a commands=(
{}  )
  _arguments -C '(- *)--help[Print the help]' '(- *)--version[Print the version]' \
    '1:command:->command' '*::argument:->argument'
  case $state in
    command) _describe command commands ;;
    argument)
      case $words[1] in
{}      esac ;;
  esac
}}

_semitone "$@"
)sh",
      names, branches);
}

std::string fish_completion(const std::vector<CommandEntry>& commands) {
  std::string lines =
      "# fish completion for semitone\n\ncomplete -c semitone -n __fish_use_subcommand -f\n";
  lines += fish_lines({"", "", "", commands.front().flags}, "__fish_use_subcommand");
  for (const CommandEntry& command : without_program(commands)) {
    lines += fmt::format("complete -c semitone -n __fish_use_subcommand -a {} -d {}\n",
                         command.name, fish_text(command.help));
    lines += fish_lines(command, "__fish_seen_subcommand_from " + command.name);
  }
  return lines;
}

}  // namespace semitone::cli
