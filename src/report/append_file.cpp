#include "src/report/append_file.h"

#include "semitone/core/error.h"
#include "src/core/file_lock.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace semitone::report {
namespace {

Descriptor open_to_append(const std::filesystem::path& path) {
  return above_standard_streams(
      Descriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666)));
}

}  // namespace

AppendFile::AppendFile(std::filesystem::path path)
    : path_(std::move(path)), file_(open_to_append(path_)) {
  if (!file_.is_open()) fail(errno);
  read_size();
}

void AppendFile::read_size() {
  struct stat status{};
  if (::fstat(file_.number(), &status) != 0) fail(errno);
  size_ = status.st_size;
}

void AppendFile::fail(int reason) const {
  throw FileError(kRunLog, "to write '" + path_.string() + "'", reason_of(reason));
}

void AppendFile::lock() {
  // The last process that had the lock may have written since the file was opened.
  if (try_lock(file_)) return read_size();
  throw FileError(kRunLog, "a directory that nothing else writes to",
                  "'" + path_.string() + "', which another process or RunLog has open",
                  "give each run its own directory, and each process its RunLogOptions::rank");
}

std::string AppendFile::read(std::int64_t offset, std::size_t count) const {
  std::string bytes(count, '\0');
  std::size_t done = 0;
  while (done < count) {
    const ssize_t got = ::pread(file_.number(), bytes.data() + done, count - done,
                                offset + static_cast<std::int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(errno);
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  bytes.resize(done);
  return bytes;
}

std::string AppendFile::beginning(std::size_t count) const {
  return read(0, std::min(count, static_cast<std::size_t>(size_)));
}

void AppendFile::remove_incomplete_line() {
  constexpr std::int64_t kPiece = 4096;
  std::int64_t end = 0;  // of the last whole line
  for (std::int64_t stop = size_; stop > 0 && end == 0; stop -= kPiece) {
    const std::int64_t begin = std::max<std::int64_t>(0, stop - kPiece);
    const auto newline = read(begin, static_cast<std::size_t>(stop - begin)).rfind('\n');
    if (newline != std::string::npos) end = begin + static_cast<std::int64_t>(newline) + 1;
  }
  if (end == size_) return;
  if (::ftruncate(file_.number(), end) != 0) fail(errno);
  size_ = end;
}

void AppendFile::flush() {
  const std::string bytes = std::exchange(waiting_, {});
  if (bytes.empty()) return;
  if (!write_all(file_.number(), bytes)) {
    const int reason = errno;
    // Devices cannot be shortened, and have no incomplete record either.
    [[maybe_unused]] const int result = ::ftruncate(file_.number(), size_);
    fail(reason);
  }
  size_ += static_cast<std::int64_t>(bytes.size());
}

}  // namespace semitone::report
