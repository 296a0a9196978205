#pragma once

#include <filesystem>

namespace semitone::launch {

// FileError unless the program exists and is executable: a path, or a name to look up in PATH.
void require_program(const std::filesystem::path& program);

}  // namespace semitone::launch
