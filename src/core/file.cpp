#include "src/core/file.h"

#include "semitone/core/error.h"
#include "src/core/descriptor.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <ios>
#include <iterator>
#include <string>
#include <system_error>

namespace semitone {
namespace {

namespace fs = std::filesystem;

// The destination of the content: the file that a symbolic link points to, and whether to replace
// it or to write to it directly.
struct Target {
  fs::path path;
  bool replace;
};

// /dev/stdout, /dev/fd/3: open files of this process. They may lead to a regular file, which must
// not be replaced, since the shell and others have it open. /dev/shm has ordinary files.
bool is_open_file(const fs::path& path) {
  const std::string name = path.lexically_normal().string();
  return name.starts_with("/proc/") || name.starts_with("/dev/fd/") || name == "/dev/stdout" ||
         name == "/dev/stderr";
}

// The most symbolic links that Linux follows.
constexpr int kMaxLinks = 40;

Target target_of(const fs::path& path) {
  std::error_code ignored;
  const auto status = fs::status(path, ignored);
  const bool is_other = status.type() != fs::file_type::regular && fs::exists(status);
  if (is_other || is_open_file(path)) return {path, false};
  // One by one: the file at the end need not exist yet.
  fs::path end = path;
  for (int links = 0; links <= kMaxLinks; ++links) {
    if (!fs::is_symlink(fs::symlink_status(end, ignored))) return {end, true};
    end = end.parent_path() / fs::read_symlink(end, ignored);
  }
  return {path, false};  // they lead to each other, as the system says when the path is opened
}

// A new file in the target's folder, with a unique name, which is removed unless it becomes the
// target.
class Partial {
 public:
  explicit Partial(const Target& target)
      : path_(target.path.string() + ".partial-XXXXXX"),
        file_(::mkostemp(path_.data(), O_CLOEXEC)),
        exists_(file_.is_open()) {}
  Partial(const Partial&) = delete;
  Partial& operator=(const Partial&) = delete;
  ~Partial() {
    if (exists_) ::unlink(path_.c_str());
  }

  const Descriptor& file() const { return file_; }

  // Returns whether it is on the disk in the target's place, with errno otherwise.
  bool become(const Target& target, mode_t mode) {
    const bool done = ::fchmod(file_.number(), mode) == 0 && ::fsync(file_.number()) == 0 &&
                      file_.close() && ::rename(path_.c_str(), target.path.c_str()) == 0;
    exists_ = !done;
    return done;
  }

 private:
  std::string path_;
  Descriptor file_;
  bool exists_;
};

// umask(2) can only be read by changing it, and files that other threads create meanwhile would be
// writable by everyone.
mode_t current_umask() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    unsigned mask = 0;
    if (word == "Umask:" && status >> std::oct >> mask) return mask;
  }
  constexpr mode_t kUsual = 022;
  return kUsual;
}

// The mode that open(2) gives a new file here, or the mode of the replaced file.
mode_t mode_for(const Target& target) {
  struct stat status{};
  if (::stat(target.path.c_str(), &status) == 0) return status.st_mode & 07777;
  return 0666 & ~current_umask();
}

[[noreturn]] void fail(std::string_view component, const fs::path& path, int reason) {
  throw FileError(component, "to write '" + path.string() + "'", reason_of(reason));
}

}  // namespace

void write_file(const fs::path& path, const std::function<void(const WritePiece&)>& produce,
                std::string_view component) {
  const auto write_to = [&](const Descriptor& file) {
    if (!file.is_open()) fail(component, path, errno);
    produce([&](std::string_view piece) {
      if (!write_all(file.number(), piece)) fail(component, path, errno);
    });
  };
  const Target target = target_of(path);
  if (target.replace) {
    Partial partial(target);
    write_to(partial.file());
    if (!partial.become(target, mode_for(target))) fail(component, path, errno);
  } else {
    Descriptor file(::open(target.path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC));
    write_to(file);
    if (!file.close()) fail(component, path, errno);
  }
}

void write_file(const fs::path& path, std::string_view content, std::string_view component) {
  write_file(path, [content](const WritePiece& write) { write(content); }, component);
}

std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

void require_writable(const fs::path& path, std::string_view component) {
  const Target target = target_of(path);
  if (!target.replace) {
    if (::access(target.path.c_str(), W_OK) != 0) fail(component, path, errno);
    std::error_code ignored;
    if (fs::is_directory(target.path, ignored)) fail(component, path, EISDIR);
    return;
  }
  const Partial partial(target);
  if (!partial.file().is_open()) fail(component, path, errno);
}

void require_writable_folder(const fs::path& folder, std::string_view component) {
  const Partial partial(Target{folder / "new", true});
  if (!partial.file().is_open()) fail(component, folder, errno);
}

}  // namespace semitone
