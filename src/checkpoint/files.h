#pragma once

#include "semitone/core/error.h"
#include "src/checkpoint/file_record.h"
#include "src/core/checksum.h"
#include "src/core/descriptor.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>

namespace semitone::checkpoint {

// Receives the bytes of a file, piece by piece. Returns their number, as LibTorch's writers require.
using Sink = std::function<std::size_t(const void*, std::size_t)>;

// A new file that is written piece by piece.
class NewFile {
 public:
  // FileError if the file exists or cannot be created.
  explicit NewFile(const std::filesystem::path& path);

  // Remembers a failure for finish() instead of reporting it: LibTorch's writers end the program if
  // a write fails while they handle an exception.
  std::size_t write(const void* data, std::size_t size);

  // Flushes the file to the disk, closes it, and sets bytes and crc32 of the record. FileError with
  // the system's reason if this or a write failed.
  void finish(FileRecord& record);

 private:
  std::filesystem::path path_;
  Descriptor file_;
  Checksum checksum_;
  std::uint64_t bytes_ = 0;
  int failure_ = 0;  // errno of the first write that failed
};

// Flushes a directory's list of files to the disk. FileError if the system cannot.
void flush_directory(const std::filesystem::path& path);

// A file of a checkpoint is missing, truncated or changed. A file that cannot be read for another
// reason (permissions, a network) may be whole, and is another FileError.
class DamageError : public FileError {
 public:
  using FileError::FileError;
};

// DamageError that names the file unless it has the size and checksum of the record; FileError if it
// cannot be read.
void verify_file(const std::filesystem::path& path, const FileRecord& record);

}  // namespace semitone::checkpoint
