#include "src/zoo/byte_source.h"

#include "semitone/core/error.h"

#include <torch/types.h>

#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <system_error>

namespace semitone::zoo {
namespace {

constexpr std::uint64_t kLargestBuffer = std::uint64_t{1} << 18;
// A file whose size is stated as 0, as those of /proc, may have data.
constexpr std::uint64_t kSmallestBuffer = 4096;
constexpr unsigned char kGzipMagic[] = {0x1f, 0x8b};
// windowBits of inflateInit2: the largest window, and gzip headers only.
constexpr int kGzipWindow = 15 + 16;
// Memory for data of unknown size is allocated in doubling pieces from this size on.
constexpr std::int64_t kFirstPiece = std::int64_t{16} << 20;

}  // namespace

std::string in(const std::filesystem::path& path) {
  return " in '" + path.string() + "'";
}

bool is_there(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::status(path, ignored).type() != std::filesystem::file_type::not_found;
}

void require_folder(const std::filesystem::path& folder, std::string_view component) {
  std::error_code error;
  const auto type = std::filesystem::status(folder, error).type();
  if (type == std::filesystem::file_type::directory) return;
  const bool is_missing = type == std::filesystem::file_type::not_found;
  if (error && !is_missing)
    throw FileError(component, "to read the folder '" + folder.string() + "'", error.message());
  throw FileError(component, "a folder '" + folder.string() + "'",
                  is_missing ? "none" : "a file of that name");
}

struct ByteSource::State {
  std::filesystem::path path;
  std::string_view component;
  std::ifstream file;
  std::uint64_t file_size = 0;
  std::size_t buffer_size = 0;
  std::unique_ptr<unsigned char[]> buffer;
  unsigned char* next = nullptr;  // what was read from the file and not used yet
  std::size_t available = 0;
  bool gzipped = false;
  bool member_ended = false;
  z_stream stream{};

  ~State() {
    if (gzipped) inflateEnd(&stream);
  }

  [[noreturn]] void fail(const std::string& expected, const std::string& got,
                         const std::string& remedy = {}) const {
    throw FileError(component, expected + " '" + path.string() + "'", got, remedy);
  }

  // Whether the file has more data.
  bool fill() {
    if (available > 0) return true;
    file.read(reinterpret_cast<char*>(buffer.get()), static_cast<std::streamsize>(buffer_size));
    if (file.bad()) fail("to read", std::generic_category().message(errno));
    next = buffer.get();
    available = static_cast<std::size_t>(file.gcount());
    return available > 0;
  }

  std::size_t copy(unsigned char* to, std::size_t size) {
    std::size_t done = 0;
    while (done < size && fill()) {
      const std::size_t count = std::min(size - done, available);
      std::copy_n(next, count, to + done);
      next += count;
      available -= count;
      done += count;
    }
    return done;
  }

  std::size_t unpack(unsigned char* to, std::size_t size) {
    std::size_t done = 0;
    while (done < size) {
      bool more = fill();
      if (member_ended) {
        // Zeros fill up the last block of some devices; gzip ignores them too.
        while (more && *next == 0) {
          ++next;
          --available;
          more = fill();
        }
        if (!more) break;
        if (*next != kGzipMagic[0]) fail("nothing after the gzip stream of", "more bytes");
        inflateReset(&stream);
        member_ended = false;
      }
      if (!more) fail("a whole gzip stream in", "one that ends early", "copy the file again");
      const std::size_t room = std::min<std::size_t>(size - done, std::numeric_limits<uInt>::max());
      stream.next_in = next;
      stream.avail_in = static_cast<uInt>(available);
      stream.next_out = to + done;
      stream.avail_out = static_cast<uInt>(room);
      const int result = inflate(&stream, Z_NO_FLUSH);
      next = stream.next_in;
      available = stream.avail_in;
      done += room - stream.avail_out;
      if (result == Z_STREAM_END) {
        member_ended = true;
      } else if (result != Z_OK && result != Z_BUF_ERROR) {
        fail("a sound gzip stream in", stream.msg == nullptr ? "a corrupt one" : stream.msg,
             "copy the file again");
      }
    }
    return done;
  }
};

ByteSource::ByteSource(const std::filesystem::path& path, std::string_view component)
    : state_(std::make_unique<State>()) {
  State& state = *state_;
  state.path = path;
  state.component = component;
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found)
    state.fail("a file", "none", "check the path");
  if (error) state.fail("to read", error.message());
  if (status.type() != std::filesystem::file_type::regular)
    state.fail("a regular file", "something else of that name");
  state.file_size = std::filesystem::file_size(path, error);
  if (error) state.fail("to read", error.message());
  state.file.open(path, std::ios::binary);
  if (!state.file) state.fail("to read", std::generic_category().message(errno));
  state.buffer_size = std::clamp(state.file_size, kSmallestBuffer, kLargestBuffer);
  state.buffer = std::make_unique_for_overwrite<unsigned char[]>(state.buffer_size);
  if (!state.fill()) state.fail("data in", "an empty file");
  if (state.available >= 2 && std::equal(state.next, state.next + 2, kGzipMagic)) {
    if (inflateInit2(&state.stream, kGzipWindow) != Z_OK) state.fail("memory to unpack", "none");
    state.gzipped = true;
  }
}

ByteSource::~ByteSource() = default;

std::size_t ByteSource::read(void* buffer, std::size_t size) {
  auto* const to = static_cast<unsigned char*>(buffer);
  return state_->gzipped ? state_->unpack(to, size) : state_->copy(to, size);
}

bool ByteSource::is_gzipped() const {
  return state_->gzipped;
}

std::uint64_t ByteSource::most_bytes() const {
  return state_->gzipped ? 1032 * state_->file_size : state_->file_size;
}

at::Tensor read_at_most(ByteSource& source, std::int64_t count) {
  at::Tensor data = torch::empty({std::min(count, kFirstPiece)}, torch::kByte);
  std::int64_t filled = 0;
  while (filled < count) {
    if (filled == data.numel()) data.resize_({std::min(count, 2 * filled)});
    const auto wanted = static_cast<std::size_t>(data.numel() - filled);
    const auto came = source.read(data.mutable_data_ptr<std::uint8_t>() + filled, wanted);
    filled += static_cast<std::int64_t>(came);
    if (came < wanted) break;
  }
  return data.narrow(0, 0, filled);
}

}  // namespace semitone::zoo
