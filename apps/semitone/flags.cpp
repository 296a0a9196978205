#include "apps/semitone/flags.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/core/descriptor.h"
#include "src/core/dtype_limits.h"
#include "src/core/env.h"
#include "src/core/nearest.h"
#include "src/core/parse_number.h"
#include "src/core/usable_cores.h"

#include <ATen/Parallel.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <fstream>
#include <utility>

namespace semitone::cli {
namespace {

std::string did_you_mean(const std::string& name, const std::vector<std::string>& candidates) {
  const std::string near = nearest(name, candidates);
  return near.empty() ? near : "did you mean " + near + "?";
}

std::string remedy_for_choice(const std::string& text, const std::vector<std::string>& choices) {
  std::string with_letter = text;
  std::replace(with_letter.begin(), with_letter.end(), '0', 'O');
  if (with_letter != text &&
      std::find(choices.begin(), choices.end(), with_letter) != choices.end())
    return "the first character is the letter O, not the digit zero";
  // Among words as short as O1 all are equally near.
  return text.size() < 3 ? "" : did_you_mean(text, choices);
}

// The missing argument: "a workload: mnist|resnet50|…".
std::string missing_argument(const CLI::App& command) {
  for (const CLI::Option* const option : command.get_options()) {
    if (option->get_required() && option->count() == 0)
      return fmt::format("a {}: {}", option->get_name(), option->get_type_name());
  }
  return {};
}

}  // namespace

void set_threads(std::int64_t threads, const std::string& component) {
  if (threads == 0) return;
  if (threads > all_cores()) {
    throw UsageError(component, fmt::format("--threads from 0 to {}, the cores here", all_cores()),
                     std::to_string(threads));
  }
  at::set_num_threads(static_cast<int>(threads));
}

void Flags::accept_underscores() {
  underscores_ = true;
}

std::string Flags::spellings(const std::string& name) const {
  if (!name.starts_with('-')) return name;
  std::string other = name.substr(name.rfind("--") + 2);
  std::replace(other.begin(), other.end(), '-', '_');
  const bool same = other.find('_') == std::string::npos;
  return underscores_ && !same ? name + ",--" + other : name;
}

CLI::Option& Flags::add(const std::string& name, const std::string& type,
                        const std::string& fallback,
                        const std::function<bool(const std::string&)>& take,
                        const std::string& expected, const std::string& help,
                        const Remedy& remedy) {
  const std::string longest = name.starts_with('-') ? name.substr(name.rfind("--")) : name;
  const auto checked = [component = component_, wanted = longest + " " + expected, take,
                        remedy](const std::string& text) {
    if (take(text)) return;
    throw UsageError(component, wanted, "'" + text + "'", remedy ? remedy(text) : "");
  };
  return *command_.add_option_function<std::string>(spellings(name), checked, help)
              ->type_name(type)
              ->default_str(fallback);
}

void Flags::integer(const std::string& name, std::int64_t& variable, std::int64_t least,
                    std::int64_t most, const std::string& help) {
  const auto take = [&variable, least, most](const std::string& text) {
    const auto value = parse_number<std::int64_t>(text);
    variable = value.value_or(variable);
    return value.has_value() && *value >= least && *value <= most;
  };
  add(name, "N", std::to_string(variable), take, fmt::format("from {} to {}", least, most), help);
}

void Flags::number(const std::string& name, double& variable,
                   const std::function<bool(double)>& check, const std::string& expected,
                   const std::string& help) {
  const auto take = [&variable, check](const std::string& text) {
    const auto value = parse_number<double>(text);
    variable = value.value_or(variable);
    return value.has_value() && check(*value);
  };
  add(name, "X", fmt::format("{}", variable), take, expected, help);
}

CLI::Option& Flags::one_of(const std::string& name, const std::string& fallback,
                           const std::vector<std::string>& choices, const Set& set,
                           const std::string& help) {
  const auto take = [choices, set](const std::string& text) {
    if (std::find(choices.begin(), choices.end(), text) == choices.end()) return false;
    set(text);
    return true;
  };
  return add(name, fmt::format("{}", fmt::join(choices, "|")), fallback, take,
             fmt::format("to be one of {}", fmt::join(choices, ", ")), help,
             [choices](const std::string& text) { return remedy_for_choice(text, choices); });
}

void Flags::choice(const std::string& name, std::string& variable,
                   const std::vector<std::string>& choices, const std::string& help) {
  choice(name, variable, choices, [&variable](const std::string& text) { variable = text; }, help);
}

void Flags::choice(const std::string& name, const std::string& fallback,
                   const std::vector<std::string>& choices, const Set& set,
                   const std::string& help) {
  one_of(name, fallback, choices, set, help);
}

void Flags::argument(const std::string& name, std::string& variable,
                     const std::vector<std::string>& choices, const std::string& help) {
  one_of(
      name, variable, choices, [&variable](const std::string& text) { variable = text; }, help)
      .required();
}

void Flags::text(const std::string& name, std::string& variable, const std::string& type,
                 const std::string& help) {
  const auto take = [&variable](const std::string& text) {
    variable = text;
    return !text.empty();
  };
  add(name, type, variable, take, type, help);
}

void Flags::text(const std::string& name, const std::string& type, const Set& set,
                 const std::string& help) {
  const auto take = [set](const std::string& text) {
    set(text);
    return !text.empty();
  };
  add(name, type, "", take, type, help);
}

void Flags::text(const std::string& name, std::string& variable, const std::string& type,
                 const std::function<bool(const std::string&)>& check, const std::string& help) {
  const auto take = [&variable, check](const std::string& text) {
    variable = text;
    return check(text);
  };
  add(name, type, variable, take, "to be one of " + type, help);
}

void Flags::parsed(const std::string& name, const std::string& type, const std::string& fallback,
                   const std::function<bool(const std::string&)>& take, const std::string& expected,
                   const std::string& help) {
  add(name, type, fallback, take, expected, help);
}

void Flags::number_or_word(const std::string& name, const std::vector<std::string>& words,
                           const Set& set, const std::string& help) {
  const auto take = [words, set](const std::string& text) {
    const auto number = parse_number<double>(text);
    const bool is_word = std::find(words.begin(), words.end(), text) != words.end();
    if (!is_word && !(number.has_value() && *number >= dtype_limits(at::kFloat).min_normal &&
                      *number <= dtype_limits(at::kFloat).max))
      return false;
    set(text);
    return true;
  };
  add(name, fmt::format("{}|X", fmt::join(words, "|")), words.front(), take,
      fmt::format("to be {} or a number that float32 holds, above 0", fmt::join(words, ", ")),
      help);
}

void Flags::mark(const std::string& name, bool& variable, const std::string& help) {
  command_.add_flag(spellings(name), variable, help);
}

void Flags::json(std::string& variable) {
  optional_file("--json", variable, "-",
                "Write the result as JSON to a file, or without one to standard output; readable "
                "output then goes to standard error");
}

void Flags::optional_file(const std::string& name, std::string& variable,
                          const std::string& fallback, const std::string& help) {
  const auto take = [&variable, fallback](const std::vector<std::string>& words) {
    variable = words.empty() || words.front().empty() ? fallback : words.front();
  };
  command_.add_option_function<std::vector<std::string>>(name, take, help)
      ->type_name("[FILE]")
      ->expected(0, 1);
}

std::string remedy_for_flag(const CLI::App& command, const std::string& flag) {
  std::vector<std::string> known;
  for (const CLI::Option* const option : command.get_options()) {
    if (option->get_group().empty()) continue;
    for (const std::string& name : option->get_lnames()) {
      if (name.find('_') == std::string::npos) known.push_back("--" + name);
    }
  }
  const std::string near = did_you_mean(flag.substr(0, flag.find('=')), known);
  return near.empty() ? "see semitone " + command.get_name() + " --help" : near;
}

void set_master(launch::LaunchOptions& options, const std::string& addr, std::int64_t port,
                const std::string& component) {
  std::string host = addr;
  int number = static_cast<int>(port);
  if (options.nnodes().max > 1 && host.empty()) {
    host = env::get(env::kMasterAddr).value_or("");
  }
  if (options.nnodes().max > 1 && number == 0) {
    if (const auto text = env::get(env::kMasterPort)) {
      number = parse_number<int>(*text).value_or(0);
      if (number < 1 || number > 65535) {
        throw UsageError(component, fmt::format("{} from 1 to 65535", env::kMasterPort.name),
                         "'" + *text + "'");
      }
    }
  }
  options.master_addr(host).master_port(number);
}

std::string rdzv_token(const std::string& file, const std::string& component) {
  const auto trimmed = [](std::string text) {
    text.erase(text.find_last_not_of(" \t\r\n") + 1);
    return text;
  };
  if (file.empty()) return trimmed(env::get(env::kRdzvToken).value_or(""));
  constexpr std::size_t kMost = 4096;
  errno = 0;
  std::ifstream stream(file);
  std::string text(kMost, '\0');
  stream.read(text.data(), kMost);
  const int failure = errno;
  text.resize(static_cast<std::size_t>(stream.gcount()));
  text = trimmed(std::move(text));
  if (text.empty()) {
    throw FileError(component, "a file with a token at '" + file + "'",
                    failure != 0 ? reason_of(failure) : "an empty one");
  }
  return text;
}

UsageError usage_error(const CLI::App& app, const CLI::ParseError& error) {
  const auto chosen = app.get_subcommands();
  const std::string command = chosen.empty() ? "" : chosen.front()->get_name();
  const std::string component = command.empty() ? "cli" : "cli." + command;
  const std::string help = "semitone " + (command.empty() ? "" : command + " ") + "--help";
  const auto unknown = app.remaining(/*recurse=*/true);
  if (!unknown.empty() && !command.empty()) {
    return {component, "flags of this command", fmt::format("'{}'", fmt::join(unknown, " ")),
            remedy_for_flag(*chosen.front(), unknown.front())};
  }
  if (!unknown.empty()) {
    std::vector<std::string> commands{"--help", "--version"};
    for (const CLI::App* const known : app.get_subcommands({}))
      commands.push_back(known->get_name());
    const std::string near = did_you_mean(unknown.front(), commands);
    return {component, "a command", fmt::format("'{}'", fmt::join(unknown, " ")),
            near.empty() ? "see " + help : near};
  }
  if (command.empty()) return {component, "a command", "none", "see " + help};
  if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr) {
    const std::string missing = missing_argument(*chosen.front());
    if (!missing.empty()) return {component, missing, "none", "see " + help};
  }
  return {component, "a command line as in " + help, error.what()};
}

}  // namespace semitone::cli
