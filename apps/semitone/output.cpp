#include "apps/semitone/output.h"

#include "apps/semitone/flags.h"
#include "src/core/env.h"
#include "src/core/file.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <iostream>
#include <system_error>

namespace semitone::cli {
namespace {

constexpr auto kJson = "cli.json";

// Whether a descriptor is a terminal that supports escape sequences.
bool is_capable_terminal(int descriptor) {
  return ::isatty(descriptor) != 0 && env::get(env::kTerm) != "dumb";
}

int descriptor_of(const std::ostream& stream) {
  return &stream == &std::cout ? STDOUT_FILENO : STDERR_FILENO;
}

}  // namespace

std::ostream& human_output(const std::string& json) {
  return json == "-" ? std::cerr : std::cout;
}

void write_json(const std::string& json, const std::string& text) {
  if (json.empty()) return;
  if (json == "-") {
    std::cout << text << '\n';
  } else {
    write_file(json, text + "\n", kJson);
  }
}

void require_json_writable(const std::string& json) {
  if (!json.empty() && json != "-") require_writable(json, kJson);
}

std::filesystem::path place_of(const std::filesystem::path& path) {
  std::error_code ignored;
  const auto place =
      std::filesystem::weakly_canonical(std::filesystem::absolute(path, ignored), ignored);
  return place.has_filename() ? place : place.parent_path();  // "runs/7/"
}

void require_two_files(std::string_view component, const FlagOfFile& one, const FlagOfFile& other) {
  constexpr auto kStandardOutput = "-";
  if (one.path.empty() || other.path.empty() || other.path == kStandardOutput) return;
  if (place_of(one.path) != place_of(other.path)) return;
  throw UsageError(component, fmt::format("two files for {} and {}", one.flag, other.flag),
                   "'" + one.path.string() + "' for both");
}

std::string bold(const std::ostream& stream, const std::string& text) {
  if (!is_capable_terminal(descriptor_of(stream)) || env::get(env::kNoColor).has_value())
    return text;
  return "\033[1m" + text + "\033[0m";
}

int terminal_columns(const std::ostream& stream) {
  const int descriptor = descriptor_of(stream);
  if (!is_capable_terminal(descriptor)) return 0;
  winsize size{};
  if (::ioctl(descriptor, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

}  // namespace semitone::cli
