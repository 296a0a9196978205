#include "src/train/run_lock.h"

#include "semitone/core/error.h"
#include "src/core/file_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace semitone::train {
namespace {

constexpr mode_t kMode = 0666;  // less umask

bool has_name(const Descriptor& file, const std::filesystem::path& path) {
  struct stat opened{};
  struct stat named{};
  return ::fstat(file.number(), &opened) == 0 && ::stat(path.c_str(), &named) == 0 &&
         opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

}  // namespace

RunLock::RunLock(const std::filesystem::path& directory)
    : directory_(directory), path_(directory / "training.lock") {
  // Another training that ends removes the file, and maybe the directory, between these calls.
  constexpr int kAttempts = 100;
  for (int attempt = 0; attempt < kAttempts && !take(); ++attempt) {
  }
}

bool RunLock::take() {
  std::error_code ignored;
  created_ |= std::filesystem::create_directories(directory_, ignored);
  Descriptor file(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, kMode));
  // A file of another user, whose training may run, can be locked too.
  if (!file.is_open() && errno != ENOENT)
    file = Descriptor(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.is_open()) return errno != ENOENT;
  if (!try_lock(file)) {
    throw FileError(
        "train.checkpoints",
        fmt::format("one training at a time with checkpoints in '{}'", directory_.string()),
        "another one, which still runs",
        fmt::format(
            "wait until it has ended, or choose another --checkpoint-dir; if its machine is "
            "gone, remove '{}'",
            path_.string()));
  }
  if (!has_name(file, path_)) return false;
  file_ = std::move(file);
  return true;
}

RunLock::~RunLock() {
  if (file_.is_open()) {
    if (has_name(file_, path_)) ::unlink(path_.c_str());
    // A child that this process forked meanwhile has the descriptor too, and would keep the lock.
    ::flock(file_.number(), LOCK_UN);
    file_ = Descriptor();  // or NFS keeps the file, and thus the directory
  }
  if (created_) ::rmdir(directory_.c_str());  // fails if it is not empty
}

}  // namespace semitone::train
