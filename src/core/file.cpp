#include "semitone/core/file.h"

#include "semitone/core/error.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string>
#include <system_error>
#include <utility>

namespace semitone {
namespace {

namespace fs = std::filesystem;

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (is_open()) ::close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  bool is_open() const { return number_ >= 0; }

  bool write(std::string_view content) const {
    while (!content.empty()) {
      const auto written = ::write(number_, content.data(), content.size());
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return false;
      content.remove_prefix(static_cast<std::size_t>(written));
    }
    return true;
  }

  bool set_mode(mode_t mode) const { return ::fchmod(number_, mode) == 0; }
  bool sync() const { return ::fsync(number_) == 0; }
  // Some file systems (NFS) report a full disk only here.
  bool close() { return ::close(std::exchange(number_, -1)) == 0; }

 private:
  int number_;
};

// Where the content goes: the file that a symbolic link names; and whether it is replaced or
// written to as it is.
struct Target {
  fs::path path;
  bool replace;
};

// /dev/stdout, /dev/fd/3: open files of this process. They may lead to a regular file, which must
// not be replaced: the shell and others have it open.
bool is_open_file(const fs::path& path) {
  const std::string name = path.lexically_normal().string();
  return name.starts_with("/dev/") || name.starts_with("/proc/");
}

Target target_of(const fs::path& path) {
  std::error_code ignored;
  const auto status = fs::status(path, ignored);
  const bool is_other = status.type() != fs::file_type::regular && fs::exists(status);
  if (is_other || is_open_file(path)) return {path, false};
  const bool is_link = fs::is_symlink(fs::symlink_status(path, ignored));
  return {is_link ? fs::weakly_canonical(path, ignored) : path, true};
}

// A new file beside the target, under a name that nobody else has.
struct Partial {
  std::string path;
  Descriptor file;

  explicit Partial(const Target& target)
      : path(target.path.string() + ".partial-XXXXXX"), file(::mkostemp(path.data(), O_CLOEXEC)) {}
};

// What open(2) gives a new file here, or what the file had that is replaced.
mode_t mode_for(const Target& target) {
  struct stat status {};
  if (::stat(target.path.c_str(), &status) == 0) return status.st_mode & 07777;
  const mode_t mask = ::umask(0);
  ::umask(mask);
  return 0666 & ~mask;
}

[[noreturn]] void fail(std::string_view where, const fs::path& path, int reason) {
  const std::string what = std::error_code(reason, std::generic_category()).message();
  throw FileError(where, "to write '" + path.string() + "'", what);
}

}  // namespace

void write_file(const fs::path& path, std::string_view content, std::string_view where) {
  const Target target = target_of(path);
  if (!target.replace) {
    Descriptor file(::open(target.path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC));
    if (!file.is_open() || !file.write(content) || !file.close()) fail(where, path, errno);
    return;
  }
  Partial partial(target);
  if (!partial.file.is_open()) fail(where, path, errno);
  if (!partial.file.write(content) || !partial.file.set_mode(mode_for(target)) ||
      !partial.file.sync() || !partial.file.close() ||
      ::rename(partial.path.c_str(), target.path.c_str()) != 0) {
    const int reason = errno;
    ::unlink(partial.path.c_str());
    fail(where, path, reason);
  }
}

void require_writable(const fs::path& path, std::string_view where) {
  const Target target = target_of(path);
  if (!target.replace) {
    if (::access(target.path.c_str(), W_OK) != 0) fail(where, path, errno);
    std::error_code ignored;
    if (fs::is_directory(target.path, ignored)) fail(where, path, EISDIR);
    return;
  }
  const Partial partial(target);
  if (!partial.file.is_open()) fail(where, path, errno);
  ::unlink(partial.path.c_str());
}

}  // namespace semitone
