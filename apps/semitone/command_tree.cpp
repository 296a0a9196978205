#include "apps/semitone/command_tree.h"

#include <algorithm>
#include <cctype>
#include <sstream>

namespace semitone::cli {
namespace {

std::vector<std::string> parts_of(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

// "N" and "X" stand for a number, others in capitals for names.
bool is_placeholder(const std::string& word) {
  return std::all_of(word.begin(), word.end(), [](unsigned char letter) {
    return std::isupper(letter) != 0 || std::ispunct(letter) != 0;
  });
}

// Of "dynamic|X" and "auto|cpu|cuda|cuda:N" those that are words.
std::vector<std::string> choices_of(const std::string& type) {
  // "N[steps|min|s]" is a number with a unit.
  if (type.find('|') == type.npos || type.find('[') != type.npos) return {};
  std::vector<std::string> choices;
  for (const std::string& part : parts_of(type, '|')) {
    const bool ends_in_number = part.ends_with(":N");
    const bool is_list = part.ends_with("…");
    if (!part.empty() && !ends_in_number && !is_list && !is_placeholder(part))
      choices.push_back(part);
  }
  return choices;
}

Value value_of(const CLI::Option& option, const FlagEntry& flag) {
  if (option.get_items_expected_max() == 0) return Value::none;
  const auto is_of = [&](const char* word) { return flag.type.find(word) != flag.type.npos; };
  const bool is_file = is_of("FILE") || flag.names.front() == "IN" || flag.names.front() == "OUT";
  if (is_file) return option.get_items_expected_min() == 0 ? Value::optional_file : Value::file;
  if (is_of("DIR")) return Value::directory;
  return flag.choices.empty() ? Value::other : Value::choice;
}

FlagEntry flag_of(const CLI::Option& option) {
  FlagEntry flag;
  for (const std::string& name : option.get_snames()) flag.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) flag.names.push_back("--" + name);
  if (flag.names.empty()) flag.names.push_back(option.get_name());
  if (option.get_items_expected_max() > 0) flag.type = option.get_type_name();
  flag.fallback = option.get_default_str();
  flag.help = option.get_description();
  flag.choices = choices_of(flag.type);
  flag.value = value_of(option, flag);
  return flag;
}

CommandEntry entry_of(const CLI::App& app) {
  CommandEntry entry{
      app.get_name(), app.get_description(), app.get_footer(), {}, app.get_prefix_command()};
  for (const CLI::Option* const option : app.get_options()) {
    const bool is_hidden = option->get_group().empty();
    if (!is_hidden) entry.flags.push_back(flag_of(*option));
  }
  return entry;
}

}  // namespace

std::vector<CommandEntry> command_tree(const CLI::App& app) {
  std::vector<CommandEntry> entries{entry_of(app)};
  const auto commands = app.get_subcommands([](const CLI::App*) { return true; });
  for (const CLI::App* const command : commands) entries.push_back(entry_of(*command));
  return entries;
}

}  // namespace semitone::cli
