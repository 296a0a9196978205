#pragma once

#include "semitone/launch/launch_options.h"
#include "src/launch/descriptor.h"
#include "src/launch/messages.h"

#include <filesystem>
#include <string>
#include <string_view>

namespace semitone::launch {

// Makes the folder. FileError if it cannot be, or nothing can be written there.
void require_log_dir(const std::filesystem::path& folder);

// Whether a folder of this name lies where it is requested: no path, nothing that cannot be read.
bool names_a_folder(std::string_view name);

// DIR/<job>/attempt_<n>, with a folder for each rank.
std::filesystem::path log_folder(const std::filesystem::path& folder, const Assignment& assignment);

// Opens it to write at its end, and makes its folders. FileError.
Descriptor open_log(const std::filesystem::path& file);

// What the file has at its end, at most 64 KiB; empty if it cannot be read.
std::string end_of_file(const std::filesystem::path& file);

// Where the streams of a process go.
Streams teed(const LaunchOptions& options, int local_rank);
Streams redirected(const LaunchOptions& options, int local_rank);

}  // namespace semitone::launch
