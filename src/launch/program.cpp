#include "src/launch/program.h"

#include "semitone/core/error.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>
#include <system_error>

namespace semitone::launch {
namespace {

constexpr auto kProgram = "launch.program";

bool is_runnable(const std::filesystem::path& file) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(file, ignored) && ::access(file.c_str(), X_OK) == 0;
}

bool is_in_path(const std::string& name) {
  const char* const path = std::getenv("PATH");
  // The system's default.
  std::string_view rest = path == nullptr ? "/bin:/usr/bin" : path;
  while (true) {
    const std::string_view folder = rest.substr(0, rest.find(':'));
    if (is_runnable(std::filesystem::path(folder.empty() ? "." : folder) / name)) return true;
    if (folder.size() == rest.size()) return false;
    rest.remove_prefix(folder.size() + 1);
  }
}

}  // namespace

void require_program(const std::filesystem::path& program) {
  const std::string name = program.string();
  std::error_code ignored;
  if (name.find('/') == std::string::npos) {
    if (is_in_path(name)) return;
    const bool here = std::filesystem::exists(program, ignored);
    throw FileError(kProgram, "a program to launch",
                    fmt::format("'{}', which is not in PATH", name),
                    here ? fmt::format("is it './{}'?", name) : "");
  }
  if (is_runnable(program)) return;
  if (!std::filesystem::exists(program, ignored))
    throw FileError(kProgram, "a program to launch",
                    fmt::format("'{}', which does not exist", name));
  if (std::filesystem::is_directory(program, ignored))
    throw FileError(kProgram, "a program to launch", fmt::format("'{}', a folder", name));
  throw FileError(kProgram, "a program to launch",
                  fmt::format("'{}', which is not executable", name),
                  fmt::format("chmod +x {}", name));
}

}  // namespace semitone::launch
