#include "src/checkpoint/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <vector>

namespace semitone::checkpoint {
namespace {

[[noreturn]] void fail_to_write(const std::filesystem::path& path, int reason) {
  throw FileError("checkpoint.save", "to write '" + path.string() + "'", reason_of(reason));
}

[[noreturn]] void refuse_file(const std::filesystem::path& path, const std::string& expected,
                              const std::string& got) {
  throw DamageError("checkpoint.verify", fmt::format("{} in '{}'", expected, path.string()), got);
}

[[noreturn]] void fail_to_read(const std::filesystem::path& path, int reason) {
  if (reason == ENOENT) refuse_file(path, "a file", reason_of(reason));
  throw FileError("checkpoint.verify", "to read '" + path.string() + "'", reason_of(reason));
}

}  // namespace

NewFile::NewFile(const std::filesystem::path& path)
    : path_(path), file_(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) {
  if (!file_.is_open()) fail_to_write(path_, errno);
}

std::size_t NewFile::write(const void* data, std::size_t size) {
  checksum_.add(data, size);
  bytes_ += size;
  if (failure_ == 0 && !write_all(file_.number(), {static_cast<const char*>(data), size}))
    failure_ = errno;
  return size;
}

void NewFile::finish(FileRecord& record) {
  if (failure_ != 0) fail_to_write(path_, failure_);
  if (::fsync(file_.number()) != 0 || !file_.close()) fail_to_write(path_, errno);
  record.bytes = bytes_;
  record.crc32 = checksum_.text();
}

void flush_directory(const std::filesystem::path& path) {
  const Descriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // Some file systems cannot flush directories (EINVAL), and need not.
  if (!directory.is_open() || (::fsync(directory.number()) != 0 && errno != EINVAL))
    fail_to_write(path, errno);
}

void verify_file(const std::filesystem::path& path, const FileRecord& record) {
  // O_NONBLOCK: opening a pipe would wait for its writer.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat status{};
  if (!file.is_open() || ::fstat(file.number(), &status) != 0) fail_to_read(path, errno);
  if (!S_ISREG(status.st_mode)) refuse_file(path, "a regular file", "something else");
  if (static_cast<std::uint64_t>(status.st_size) != record.bytes)
    refuse_file(path, fmt::format("{} bytes", record.bytes), std::to_string(status.st_size));
  std::vector<char> buffer(std::size_t{1} << 20);
  Checksum checksum;
  while (true) {
    const ssize_t count = ::read(file.number(), buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail_to_read(path, errno);
    if (count == 0) break;
    checksum.add(buffer.data(), static_cast<std::size_t>(count));
  }
  if (checksum.text() != record.crc32)
    refuse_file(path, "the checksum " + record.crc32, checksum.text());
}

}  // namespace semitone::checkpoint
