#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace semitone {

// Writes a whole regular file or nothing. The content goes to a new file "PATH.partial-…" in the same
// folder, is flushed to the disk, and then takes the target's name and mode. Readers therefore
// find either the old file or the new one. A symbolic link stays a link, and the file that it
// points to is replaced, or made if there is none. What is written to anything that is not a regular
// file (a pipe), and to open files of this process (/dev/stdout, /dev/fd/3, a path in /proc), is
// appended directly, as far as it goes: they may then have a part of it.
//
// @param component  the calling component, for the message: "train.checkpoint"
// FileError with the system's reason (no folder, no permission, disk full …). A regular file at
// PATH is then unchanged, and no partial file is left.
void write_file(const std::filesystem::path& path, std::string_view content,
                std::string_view component);

// Writes a piece of the content; FileError if that fails.
using WritePiece = std::function<void(std::string_view piece)>;

// The same for a content that is not in memory as a whole: `produce` writes its pieces in order. An
// exception of `produce` passes through, and then nothing is written.
void write_file(const std::filesystem::path& path,
                const std::function<void(const WritePiece&)>& produce, std::string_view component);

// The content of a text file; empty if it cannot be read.
std::string read_text(const std::filesystem::path& path);

// Throws FileError unless write_file() could start to write there now. Call it before hours of
// work. Changes nothing.
void require_writable(const std::filesystem::path& path, std::string_view component);

// The same for new files, of any names, in a folder that exists.
void require_writable_folder(const std::filesystem::path& folder, std::string_view component);

}  // namespace semitone
