#pragma once

#include "src/checkpoint/file_record.h"

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace semitone::checkpoint {

inline constexpr auto kManifest = "manifest.json";

// Settings of a run by name, see Checkpoint::add_setting.
using Settings = std::map<std::string, std::string>;

// The list of a checkpoint's files, which is written last. docs/checkpoints.md documents the JSON.
struct Manifest {
  std::int64_t step = 0;
  std::int64_t world_size = 1;
  Settings settings;
  std::vector<FileRecord> files;
  std::optional<double> metric;  // finite

  // Null if there is none. `rank` is that of an entry with PerRank::yes.
  const FileRecord* find(const std::string& name, const std::optional<int>& rank) const;
};

// Error for a manifest that read_manifest would refuse for its size.
std::string to_text(const Manifest& manifest);

// The records of one rank, as text for other ranks. records_from throws FileError for other texts.
std::string to_text(const std::vector<FileRecord>& records);
std::vector<FileRecord> records_from(const std::string& text);

// Whether an entry may have this name, of which its file's name is made: letters, digits, '_', '-'
// and '.', beginning with a letter or digit.
bool is_entry_name(std::string_view name);

// Reads and checks the text of a manifest. FileError as read_manifest; the path is for messages.
Manifest parse_manifest(const std::filesystem::path& path, const std::string& text);

// Reads and checks the manifest of a checkpoint's directory. FileError that names the file if it is
// missing, larger than 64 MiB, of another format, differs from what was written, or has names or
// numbers that no checkpoint has.
Manifest read_manifest(const std::filesystem::path& directory);

}  // namespace semitone::checkpoint
