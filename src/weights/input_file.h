#pragma once

#include "src/core/descriptor.h"

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace semitone::weights {

inline constexpr auto kCopyAgain = "is the file complete? copy or save it again";

// A regular file that is read in pieces. FileError if it cannot be opened or is no regular file.
class InputFile {
 public:
  explicit InputFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  std::uint64_t size() const { return size_; }

  // Fills the buffer from this position on. FileError if the file does not have as many bytes.
  void read(std::uint64_t position, void* buffer, std::size_t size) const;
  // The same as text.
  std::string read(std::uint64_t position, std::size_t size) const;

  // "'PATH'", and " in 'PATH'", for messages.
  std::string quoted() const;
  std::string in() const;
  // Throws FileError: "expected … in 'PATH', got …". The default remedy is for damaged files.
  [[noreturn]] void refuse(const std::string& expected, const std::string& got,
                           std::string_view remedy = kCopyAgain) const;

 private:
  std::filesystem::path path_;
  Descriptor file_;
  std::uint64_t size_ = 0;
};

}  // namespace semitone::weights
