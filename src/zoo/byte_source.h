#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

namespace semitone::zoo {

// " in 'path'", for messages.
std::string in(const std::filesystem::path& path);

// Whether there is anything at the path, or something that the system does not show, whose reader
// then says why.
bool is_there(const std::filesystem::path& path);

// FileError unless the path is that of a folder, with the system's reason if it does not show what
// is there.
void require_folder(const std::filesystem::path& folder, std::string_view component);

// The bytes of a file, unpacked on the way if it is gzipped (one member or several in a row).
// Throws FileError, of the reader that the component names, if it cannot be opened or read, is empty,
// or if the gzip stream is corrupt or ends early.
class ByteSource {
 public:
  // @param component  for errors; a literal
  ByteSource(const std::filesystem::path& path, std::string_view component);
  ~ByteSource();

  // Fills the buffer as far as there is data. Returns the number of bytes, which is less than
  // requested only at the end.
  std::size_t read(void* buffer, std::size_t size);

  bool is_gzipped() const;

  // An upper bound of the number of bytes: the size of a plain file, and 1032 times that of a
  // gzipped one, which is deflate's largest ratio.
  std::uint64_t most_bytes() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The bytes up to the end, at most `count` of them: uint8, (n). Memory is allocated as they arrive.
at::Tensor read_at_most(ByteSource& source, std::int64_t count);

}  // namespace semitone::zoo
