#pragma once

#include "src/core/descriptor.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace semitone::report {

// The component in errors of RunLog.
inline constexpr auto kRunLog = "report.run_log";

// A file that grows by whole records, from memory. All functions throw FileError with the path and
// the system's reason.
class AppendFile {
 public:
  // Opens the file, or creates it.
  explicit AppendFile(std::filesystem::path path);

  // Takes the file for this process, until it is closed. FileError if another has it. File systems
  // without locks have no such error.
  void lock();
  // Removes an incomplete last line, which a write leaves if the system stops in the middle of it.
  void remove_incomplete_line();

  std::int64_t size() const { return size_; }
  // Returns up to this number of bytes from the beginning.
  std::string beginning(std::size_t count) const;

  void add(std::string_view record) { waiting_ += record; }
  std::size_t waiting() const { return waiting_.size(); }
  // Writes what was added with one write. After an error the file is as before, and what was added
  // is lost.
  void flush();

 private:
  void read_size();
  std::string read(std::int64_t offset, std::size_t count) const;
  [[noreturn]] void fail(int reason) const;

  std::filesystem::path path_;
  Descriptor file_;
  std::int64_t size_ = 0;
  std::string waiting_;
};

}  // namespace semitone::report
