#include "apps/semitone/train_config.h"

#include "apps/semitone/config_lines.h"
#include "apps/semitone/flags.h"
#include "apps/semitone/train_flags.h"
#include "src/core/descriptor.h"
#include "src/core/printable.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <system_error>

namespace semitone::cli {
namespace {

// The flags of one start that do not change what is computed: processes have their own, and
// run.json has the number of processes.
const std::set<std::string_view> kOfTheStart{"log-dir",     "log-every", "master-addr",
                                             "master-port", "max-data",  "node-rank",
                                             "nodes",       "nproc",     "quiet"};

// In bytes. All flags, with long paths, take a tenth of it.
constexpr std::size_t kMaxConfig = std::size_t{1} << 16;

std::string read_config(const std::string& path) {
  const std::string expected = "to read '" + path + "'";
  std::error_code ignored;
  errno = 0;
  std::ifstream file(path);
  if (!file) throw FileError(kTrain, expected, reason_of(errno));
  if (std::filesystem::is_directory(path, ignored))
    throw FileError(kTrain, expected, reason_of(EISDIR));
  // Reads no more than the limit, since a device or a pipe may have no end.
  std::string text(kMaxConfig + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) throw FileError(kTrain, expected, reason_of(errno));
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.size() > kMaxConfig) {
    throw FileError(kTrain, fmt::format("at most {} bytes of flags in '{}'", kMaxConfig, path),
                    "more");
  }
  return text;
}

bool is_mark(const CLI::Option& option) {
  return option.get_items_expected_max() == 0;
}

CLI::Option& find_flag(CLI::App& command, const std::string& name, const std::string& path) {
  const std::string flag = "--" + name;
  CLI::Option* const option = command.get_option_no_throw(flag);
  if (option != nullptr && option->get_configurable()) return *option;
  throw UsageError(
      kTrain, fmt::format("flags of this command in '{}'", path), fmt::format("'{}'", name),
      option == nullptr ? remedy_for_flag(command, flag) : "give " + flag + " on the command line");
}

void set_flag(CLI::Option& option, const std::string& name, const std::optional<std::string>& given,
              const std::string& path) {
  if (!given.has_value() && !is_mark(option))
    throw UsageError(kTrain, fmt::format("a value for '{}' in '{}'", name, path), "none");
  const std::string value = given.value_or("true");
  if (is_mark(option) && value != "true" && value != "false")
    throw UsageError(kTrain, fmt::format("{} in '{}' to be true or false", name, path),
                     "'" + value + "'");
  if (is_mark(option) && value == "false") return;
  option.add_result(value);
  option.run_callback();
}

// The value of a flag as text; nothing if it has none.
std::string text_of(const CLI::Option& option) {
  if (is_mark(option)) return option.count() > 0 && option.as<bool>() ? "true" : "false";
  return option.count() > 0 ? option.results().front() : option.get_default_str();
}

}  // namespace

void apply_config(CLI::App& command, const std::string& path) {
  const auto lines = parse_config(read_config(path), command.get_name(), path, kTrain);
  std::set<std::string> given;
  for (const CLI::Option* const option : command.get_options()) {
    if (option->count() > 0) given.insert(option->get_name());
  }
  std::set<std::string> in_file;
  for (const auto& [name, value] : lines) {
    CLI::Option& option = find_flag(command, name, path);
    if (!in_file.insert(option.get_name()).second) {
      throw UsageError(kTrain, fmt::format("each flag once in '{}'", path),
                       fmt::format("'{}' twice", name));
    }
    // The command line overrides the file.
    if (!given.contains(option.get_name())) set_flag(option, name, value, path);
  }
}

std::string config_text(const CLI::App& command) {
  std::string text;
  for (const CLI::Option* const option : command.get_options()) {
    if (!option->get_configurable()) continue;
    const bool is_default = option->count() == 0;
    const std::string value = text_of(*option);
    if (is_default && value.empty()) continue;
    const auto written = to_config_value(value);
    if (written.has_value()) {
      text += fmt::format("\n# {}\n{}{}={}\n", option->get_description(), is_default ? "# " : "",
                          option->get_single_name(), *written);
    } else if (!is_default) {
      throw UsageError(kTrain,
                       "values without control characters or both kinds of quotes with "
                       "--print-config",
                       fmt::format("{} '{}'", option->get_name(), printable(value)),
                       "--config cannot read it");
    }
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
