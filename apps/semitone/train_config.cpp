#include "apps/semitone/train_config.h"

#include "apps/semitone/flags.h"
#include "apps/semitone/train_flags.h"
#include "src/core/descriptor.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace semitone::cli {
namespace {

// The flags of one start that do not change what is computed: processes have their own, and
// run.json has the number of processes.
const std::set<std::string_view> kOfTheStart{"log-dir",   "log-every", "master-addr", "master-port",
                                             "node-rank", "nodes",     "nproc",       "quiet"};

// CLI11 marks where sections begin and end with these names.
bool is_section(const CLI::ConfigItem& item) {
  return item.name == "++" || item.name == "--";
}

bool is_mark(const CLI::Option& option) {
  return option.get_items_expected_max() == 0;
}

// The flag's value in the file.
std::string value_of(const CLI::ConfigItem& item, const std::string& path) {
  const auto fail = [&](const std::string& expected, const std::string& got) {
    throw UsageError(kTrain, fmt::format("{} for '{}' in '{}'", expected, item.name, path), got);
  };
  if (item.inputs.size() != 1) fail("one value", std::to_string(item.inputs.size()));
  const std::string& value = item.inputs.front();
  // CLI11 2.1 takes # for the beginning of a comment in quotes too, and the quote then stays.
  const bool is_cut_off = value.starts_with('"') || value.starts_with('\'');
  if (is_cut_off) fail("a value without # in its quotes", value);
  return value;
}

void apply(CLI::App& command, const CLI::ConfigItem& item, const std::string& path) {
  const std::string flag = "--" + item.name;
  const bool is_here =
      item.parents.empty() || item.parents == std::vector<std::string>{command.get_name()};
  CLI::Option* const option = is_here ? command.get_option_no_throw(flag) : nullptr;
  if (option == nullptr || !option->get_configurable()) {
    throw UsageError(kTrain, fmt::format("flags of this command in '{}'", path),
                     fmt::format("'{}'", item.fullname()),
                     option == nullptr ? remedy_for_flag(command, flag)
                                       : "give " + flag + " on the command line");
  }
  const std::string value = value_of(item, path);
  if (is_mark(*option) && value != "true" && value != "false")
    throw UsageError(kTrain, fmt::format("{} in '{}' to be true or false", item.name, path),
                     "'" + value + "'");
  if (is_mark(*option) && value == "false") return;
  option->add_result(value);
  option->run_callback();
}

// The value of a flag as text; nothing if it has none.
std::string text_of(const CLI::Option& option) {
  if (is_mark(option)) return option.count() > 0 && option.as<bool>() ? "true" : "false";
  return option.count() > 0 ? option.results().front() : option.get_default_str();
}

}  // namespace

void apply_config(CLI::App& command, const std::string& path) {
  std::error_code ignored;
  std::ifstream file(path);
  if (!file) throw FileError(kTrain, "to read '" + path + "'", reason_of(errno));
  if (std::filesystem::is_directory(path, ignored))
    throw FileError(kTrain, "to read '" + path + "'", reason_of(EISDIR));
  std::vector<CLI::ConfigItem> items;
  try {
    items = command.get_config_formatter()->from_config(file);
  } catch (const CLI::Error& error) {
    throw UsageError(kTrain, "TOML or INI in '" + path + "'", error.what());
  }
  std::set<std::string> given;
  for (const CLI::Option* const option : command.get_options()) {
    if (option->count() > 0) given.insert(option->get_name());
  }
  for (const CLI::ConfigItem& item : items) {
    if (is_section(item)) continue;
    const CLI::Option* const option = command.get_option_no_throw("--" + item.name);
    if (option != nullptr && option->get_configurable() && option->count() > 0) {
      if (given.contains(option->get_name())) continue;  // the command line counts
      throw UsageError(kTrain, fmt::format("each flag once in '{}'", path),
                       fmt::format("'{}' twice", item.name));
    }
    apply(command, item, path);
  }
}

std::string config_text(const CLI::App& command) {
  for (const CLI::Option* const option : command.get_options()) {
    const bool is_written = option->get_configurable() && option->count() > 0;
    const std::string value = is_written ? text_of(*option) : "";
    const auto is_unreadable = [](unsigned char c) { return c < ' ' || c == '#' || c == '"'; };
    if (value.starts_with('\'') || std::any_of(value.begin(), value.end(), is_unreadable)) {
      throw UsageError(kTrain, "values without #, quotes and line breaks with --print-config",
                       fmt::format("{} '{}'", option->get_name(), value),
                       "--config cannot read it");
    }
  }
  std::istringstream lines(
      command.config_to_str(/*default_also=*/true, /*write_description=*/true));
  std::string text;
  for (std::string line; std::getline(lines, line);) {
    const auto equals = line.find('=');
    const bool is_value = !line.starts_with('#') && equals != std::string::npos;
    const CLI::Option* const option =
        is_value ? command.get_option_no_throw("--" + line.substr(0, equals)) : nullptr;
    const bool is_default = option != nullptr && option->count() == 0;
    text += (is_default ? "# " : "") + line + '\n';
  }
  return text;
}

std::map<std::string, std::string> config_of(const CLI::App& command) {
  std::map<std::string, std::string> config;
  for (const CLI::Option* const option : command.get_options()) {
    const std::string value = text_of(*option);
    const std::string name = option->get_single_name();
    if (option->get_configurable() && !value.empty() && !kOfTheStart.contains(name))
      config[name] = value;
  }
  return config;
}

}  // namespace semitone::cli
