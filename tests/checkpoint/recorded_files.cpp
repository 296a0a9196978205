// Loaded with LD_PRELOAD: records the calls that change files and those that flush them, as they
// succeed, in the file SEMITONE_TEST_LOG. A line is a word, a tab and a path; a rename also has the
// new path, after a tab. The flush number SEMITONE_TEST_FAILING_FLUSH, from 1, fails with EIO.
// NOLINTBEGIN(readability-identifier-naming,readability-inconsistent-declaration-parameter-name):
// the C library's names.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

// By system calls, which are not recorded themselves.
void record(const std::string& words) {
  const char* const log = std::getenv("SEMITONE_TEST_LOG");
  if (log == nullptr) return;
  const int before = errno;
  const std::string line = words + '\n';
  const long file =
      ::syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  ::syscall(SYS_write, file, line.data(), line.size());
  ::syscall(SYS_close, file);
  errno = before;
}

std::string path_of(int file) {
  const std::string link = "/proc/self/fd/" + std::to_string(file);
  char path[PATH_MAX];
  const ssize_t size = ::readlink(link.c_str(), path, sizeof(path));
  return {path, size < 0 ? 0 : static_cast<std::size_t>(size)};
}

int flush(long call, int file) {
  static std::atomic<int> count{0};
  const char* const failing = std::getenv("SEMITONE_TEST_FAILING_FLUSH");
  if (++count == (failing == nullptr ? 0 : std::strtol(failing, nullptr, 10))) {
    record("fail\t" + path_of(file));
    errno = EIO;
    return -1;
  }
  const auto result = static_cast<int>(::syscall(call, file));
  if (result == 0) record("flush\t" + path_of(file));
  return result;
}

}  // namespace

extern "C" {

int mkdir(const char* path, mode_t mode) noexcept {
  const auto result = static_cast<int>(::syscall(SYS_mkdirat, AT_FDCWD, path, mode));
  if (result == 0) record(std::string("mkdir\t") + path);
  return result;
}

ssize_t write(int file, const void* data, size_t size) {
  const ssize_t written = ::syscall(SYS_write, file, data, size);
  if (written > 0) record("write\t" + path_of(file));
  return written;
}

int fsync(int file) {
  return flush(SYS_fsync, file);
}

int fdatasync(int file) {
  return flush(SYS_fdatasync, file);
}

int renameat2(int from_in, const char* from, int to_in, const char* to, unsigned flags) noexcept {
  const auto result = static_cast<int>(::syscall(SYS_renameat2, from_in, from, to_in, to, flags));
  if (result == 0) record(std::string("rename\t") + from + '\t' + to);
  return result;
}

int rename(const char* from, const char* to) noexcept {
  return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0);
}
}
// NOLINTEND(readability-identifier-naming,readability-inconsistent-declaration-parameter-name)
