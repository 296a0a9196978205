#include "semitone/core/file.h"

#include "semitone/core/error.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

namespace semitone {
namespace {

namespace fs = std::filesystem;

class Descriptor {
 public:
  Descriptor(const fs::path& path, int flags) : number_(::open(path.c_str(), flags, 0666)) {}
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

Target target_of(const fs::path& path) {
  std::error_code ignored;
  const auto status = fs::status(path, ignored);
  if (status.type() != fs::file_type::regular && fs::exists(status)) return {path, false};
  const bool is_link = fs::is_symlink(fs::symlink_status(path, ignored));
  return {is_link ? fs::weakly_canonical(path, ignored) : path, true};
}

fs::path partial_of(const Target& target) {
  return target.path.string() + ".partial";
}

[[noreturn]] void fail(std::string_view where, const fs::path& path, int reason) {
  const std::string what = std::error_code(reason, std::generic_category()).message();
  throw FileError(where, "to write '" + path.string() + "'", what);
}

}  // namespace

void write_file(const fs::path& path, std::string_view content, std::string_view where) {
  const Target target = target_of(path);
  if (!target.replace) {
    Descriptor file(target.path, O_WRONLY | O_CLOEXEC);
    if (!file.is_open() || !file.write(content) || !file.close()) fail(where, path, errno);
    return;
  }
  const fs::path partial = partial_of(target);
  Descriptor file(partial, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC);
  if (!file.is_open()) fail(where, path, errno);
  if (!file.write(content) || !file.sync() || !file.close() ||
      ::rename(partial.c_str(), target.path.c_str()) != 0) {
    const int reason = errno;
    ::unlink(partial.c_str());
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
  const fs::path partial = partial_of(target);
  const Descriptor file(partial, O_WRONLY | O_CREAT | O_CLOEXEC);
  if (!file.is_open()) fail(where, path, errno);
  ::unlink(partial.c_str());
}

}  // namespace semitone
