#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>

namespace semitone::zoo {

// Who speaks in errors.
inline constexpr auto kIdx = "zoo.idx";

// The bytes of a file, unpacked on the way if it is gzipped (one member or several in a row).
// Throws FileError if it cannot be opened or read, or if the gzip stream is corrupt or ends early.
class ByteSource {
 public:
  explicit ByteSource(const std::filesystem::path& path);
  ~ByteSource();

  // Fills the buffer as far as there is data. Returns how many bytes came: fewer than requested
  // only at the end.
  std::size_t read(void* buffer, std::size_t size);

  // No more bytes than this can come, whatever the header says: the size of a plain file, and 1032
  // times that of a gzipped one, which is the most that deflate can pack.
  std::uint64_t most_bytes() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace semitone::zoo
