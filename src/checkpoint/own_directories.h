#pragma once

#include <filesystem>

namespace semitone::checkpoint {

// The directories in which this process has saved or from which it has resumed, with any object: a
// program may make a new Checkpoint for each save. From several threads at the same time.
void note_own(const std::filesystem::path& directory);
bool is_own(const std::filesystem::path& directory);

}  // namespace semitone::checkpoint
