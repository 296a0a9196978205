#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>

namespace semitone::zoo {

// The component in errors.
inline constexpr auto kIdx = "zoo.idx";

// The bytes of a file, unpacked on the way if it is gzipped (one member or several in a row).
// Throws FileError if it cannot be opened or read, or if the gzip stream is corrupt or ends early.
class ByteSource {
 public:
  explicit ByteSource(const std::filesystem::path& path);
  ~ByteSource();

  // Fills the buffer as far as there is data. Returns the number of bytes, which is less than
  // requested only at the end.
  std::size_t read(void* buffer, std::size_t size);

  // An upper bound of the number of bytes: the size of a plain file, and 1032 times that of a
  // gzipped one, which is deflate's largest ratio.
  std::uint64_t most_bytes() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace semitone::zoo
