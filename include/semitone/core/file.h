#pragma once

#include <filesystem>
#include <string_view>

namespace semitone {

/// Writes a whole file or none: the content goes to a new file "PATH.partial-…" beside the target, is
/// flushed to the disk and then takes the target's name and mode, so whoever looks finds the old
/// file or the new one. A symbolic link stays one, and the file that it names is replaced. What is
/// not a regular file (a pipe), and whatever is named through /dev or /proc (/dev/stdout), is
/// appended to directly.
///
/// @param where  who writes, for the message: "train.checkpoint"
/// FileError with the system's reason (no folder, no permission, disk full …); a regular file at
/// PATH is then as before, and nothing partial is left.
void write_file(const std::filesystem::path& path, std::string_view content,
                std::string_view where);

/// FileError unless write_file() could begin to write there now: for asking before hours of work.
/// Changes nothing.
void require_writable(const std::filesystem::path& path, std::string_view where);

}  // namespace semitone
