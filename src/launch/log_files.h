#pragma once

#include "semitone/launch/launch_options.h"
#include "src/launch/descriptor.h"
#include "src/launch/messages.h"

#include <filesystem>
#include <string>
#include <string_view>

namespace semitone::launch {

// Creates the folder. FileError if it cannot be created or written to.
void require_log_dir(const std::filesystem::path& folder);

// Whether a name can be used for a single folder: no path separators, no unprintable characters.
bool names_a_folder(std::string_view name);

// DIR/<job>/attempt_<n>, with a folder for each rank.
std::filesystem::path log_folder(const std::filesystem::path& folder, const Assignment& assignment);

// Opens a file for appending, and creates its folders. FileError.
Descriptor open_log(const std::filesystem::path& file);

// The end of a file, at most 64 KiB; empty if it cannot be read.
std::string end_of_file(const std::filesystem::path& file);

// The log files for the streams of a process.
Streams teed(const LaunchOptions& options, int local_rank);
Streams redirected(const LaunchOptions& options, int local_rank);

}  // namespace semitone::launch
