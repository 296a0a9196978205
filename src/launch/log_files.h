#pragma once

#include "semitone/launch/launch_options.h"
#include "src/launch/descriptor.h"
#include "src/launch/messages.h"

#include <cstdint>
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

// A log file that is open for appending.
struct LogFile {
  Descriptor descriptor;
  std::int64_t size = 0;  // bytes that an earlier job of the same name has left in it
};

// Opens a file for appending, and creates its folders. FileError.
LogFile open_log(const std::filesystem::path& file);

// The end of what was appended to a file since it had this size, at most 64 KiB; empty if the file
// cannot be read.
std::string end_of_file(const std::filesystem::path& file, std::int64_t size);

// The log files for the streams of a process.
Streams teed(const LaunchOptions& options, int local_rank);
Streams redirected(const LaunchOptions& options, int local_rank);

}  // namespace semitone::launch
