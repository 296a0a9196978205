#include "src/checkpoint/folder.h"

#include "semitone/core/error.h"
#include "src/checkpoint/files.h"
#include "src/core/file_lock.h"
#include "src/core/log.h"
#include "src/core/parse_number.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <string_view>
#include <system_error>
#include <utility>

namespace semitone::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kPartial = ".partial";
constexpr std::string_view kOld = "-old.partial";  // while another takes its place
constexpr std::size_t kDigits = 8;                 // at least

// The step of a complete checkpoint's directory. Only the name that complete_path() gives is one.
std::optional<std::int64_t> step_of(const std::string& name) {
  if (!name.starts_with(kPrefix) || name.size() < kPrefix.size() + kDigits) return std::nullopt;
  const auto step = parse_number<std::int64_t>(std::string_view(name).substr(kPrefix.size()));
  return step.has_value() && complete_path("", *step) == name ? step : std::nullopt;
}

[[noreturn]] void fail_in(const fs::path& directory, int reason, std::string_view remedy = {}) {
  throw FileError("checkpoint.save",
                  fmt::format("to write a checkpoint in '{}'", directory.string()),
                  reason_of(reason), remedy);
}

bool is_partial(const std::string& name) {
  return name.starts_with(kPrefix) && name.ends_with(kPartial);
}

// What is in a directory, as far as it can be listed.
std::vector<fs::path> entries_in(const fs::path& directory, std::error_code& error) {
  std::vector<fs::path> entries;
  for (fs::directory_iterator entry(directory, error); !error && entry != fs::directory_iterator();
       entry.increment(error))
    entries.push_back(entry->path());
  return entries;
}

// Whether there is something else than a directory. If the system cannot say, there may be one.
bool is_another_kind_of_file(const fs::path& path) {
  std::error_code ignored;
  const auto status = fs::status(path, ignored);
  return fs::exists(status) && !fs::is_directory(status);
}

// Creates the directory with its parents, and flushes their entries.
void create(const fs::path& directory) {
  std::error_code error;
  if (fs::is_directory(directory, error)) return;
  // "runs/" is in ".", not in "runs".
  const fs::path name = directory.has_filename() ? directory : directory.parent_path();
  const fs::path parent = name.has_parent_path() ? name.parent_path() : fs::path(".");
  if (name != parent) create(parent);
  fs::create_directory(name, error);
  if (error == std::errc::file_exists) error.assign(ENOTDIR, std::generic_category());
  if (error) fail_in(directory, error.value(), "choose a directory that this user may write to");
  // A directory may be writable and not readable, and can then not be flushed.
  if (::access(parent.c_str(), R_OK) == 0) flush_directory(parent);
}

// Puts one directory into the place of another where names cannot be exchanged. There is neither for
// a moment, under its name. Leaves both as they were if it fails.
std::error_code replace_in_two_steps(const fs::path& partial, const fs::path& complete) {
  std::error_code error;
  const fs::path old = fs::path(complete).concat(kOld);
  fs::rename(complete, old, error);
  if (error) return error;
  fs::rename(partial, complete, error);
  std::error_code ignored;
  if (error) fs::rename(old, complete, ignored);
  return error;
}

// The device and number of a directory; none if it does not exist.
std::optional<std::pair<dev_t, ino_t>> identity_of(const fs::path& directory) {
  struct stat status{};
  if (::stat(directory.c_str(), &status) != 0) return std::nullopt;
  return std::pair(status.st_dev, status.st_ino);
}

Descriptor open_directory(const fs::path& directory) {
  return Descriptor(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

// The path, or the part of it, that is a symbolic link to nothing; empty if there is none.
fs::path link_without_target(fs::path path) {
  std::error_code ignored;
  for (; path.has_relative_path(); path = path.parent_path()) {
    if (fs::exists(path, ignored)) break;
    if (fs::is_symlink(path, ignored)) return path;
  }
  return {};
}

// Checkpoints that were to be replaced by others, which do not have their names yet: where they are,
// and their names.
std::vector<std::pair<fs::path, fs::path>> left_without_names(const fs::path& directory) {
  std::vector<std::pair<fs::path, fs::path>> found;
  std::error_code error;
  for (const fs::path& path : entries_in(directory, error)) {
    if (!path.filename().string().ends_with(kOld)) continue;
    std::string name = path.filename().string();
    name.resize(name.size() - kOld.size());
    fs::path complete = directory / name;
    if (step_of(name).has_value() && !fs::exists(fs::symlink_status(complete, error)))
      found.emplace_back(path, std::move(complete));
  }
  return found;
}

// Gives them their names back: the process was killed before the others had them.
void recover_locked(const fs::path& directory) {
  std::error_code ignored;
  for (const auto& [path, complete] : left_without_names(directory))
    fs::rename(path, complete, ignored);
}

}  // namespace

fs::path complete_path(const fs::path& directory, std::int64_t step) {
  return directory / fmt::format("{}{:0{}}", kPrefix, step, kDigits);
}

fs::path partial_path(const fs::path& directory, std::int64_t step) {
  return complete_path(directory, step).concat(kPartial);
}

std::vector<std::int64_t> steps_in(const fs::path& directory) {
  std::vector<std::int64_t> steps;
  std::error_code error;
  for (const fs::path& path : entries_in(directory, error)) {
    const auto step = step_of(path.filename().string());
    if (step.has_value() && !is_another_kind_of_file(path)) steps.push_back(*step);
  }
  const auto expected = fmt::format("a directory of checkpoints '{}'", directory.string());
  if (error && error != std::errc::no_such_file_or_directory) {
    throw FileError("checkpoint", expected, error.message(),
                    "name a directory that this user may read");
  }
  if (error) {
    if (const auto link = link_without_target(directory); !link.empty()) {
      throw FileError("checkpoint", expected,
                      fmt::format("'{}', a link to what does not exist", link.string()),
                      "is its file system mounted? Otherwise remove the link");
    }
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::vector<std::int64_t> steps_to_resume_in(const fs::path& directory) {
  // Another process cannot save while this one has the lock, so it is taken only if it is needed.
  if (!left_without_names(directory).empty()) {
    if (const Descriptor opened = open_directory(directory); opened.is_open() && try_lock(opened))
      recover_locked(directory);
  }
  return steps_in(directory);
}

Staging::Staging(fs::path directory) : directory_(std::move(directory)) {
  create(directory_);
  take_lock();
  recover_locked(directory_);
}

void Staging::begin(std::int64_t step) {
  step_ = step;
  remove_partial();
  if (::mkdir(partial_path(directory_, step_).c_str(), 0777) != 0)
    fail_in(directory_, errno, "choose a directory that this user may write to");
  created_ = true;
  identity_ = identity_of(partial_path(directory_, step_));
}

Staging::~Staging() {
  std::error_code ignored;
  if (created_) fs::remove_all(partial_path(directory_, step_), ignored);
  // A child that this process forked meanwhile has the descriptor too, and would keep the lock.
  if (lock_.is_open()) ::flock(lock_.number(), LOCK_UN);
}

void Staging::take_lock() {
  lock_ = open_directory(directory_);
  if (!lock_.is_open())
    fail_in(directory_, errno, "choose a directory that this user may write to");
  // Some network file systems have no locks. Saving works there, without this check.
  if (try_lock(lock_)) return;
  fail_beside_another();
}

void Staging::fail_beside_another() const {
  throw FileError("checkpoint.save",
                  fmt::format("one process at a time that saves in '{}'", directory_.string()),
                  "another one that is saving there",
                  "end that process, or choose another directory; ranks of one run share a "
                  "Checkpoint through CheckpointOptions::group");
}

void Staging::remove_partial() const {
  std::error_code error;
  const auto entries = entries_in(directory_, error);
  if (error) fail_in(directory_, error.value(), "choose a directory that this user may write to");
  for (const fs::path& path : entries) {
    if (!is_partial(path.filename().string())) continue;
    fs::remove_all(path, error);
    if (!error) continue;
    if (path == partial_path(directory_, step_))
      fail_in(directory_, error.value(), "remove its *.partial directories");
    // Perhaps another user's file in an old checkpoint. The new one does not need the name.
    log()->warn("[checkpoint.save] could not remove '{}': {}", path.string(), error.message());
  }
}

void Staging::commit() {
  const fs::path partial = partial_path(directory_, step_);
  const fs::path complete = complete_path(directory_, step_);
  // Without locks, another process may have begun this step anew, and the files be of both.
  if (identity_of(partial) != identity_) {
    created_ = false;  // it is not this one's to remove
    fail_beside_another();
  }
  flush_directory(partial);
  // If there is a checkpoint of this step, the two change their names at once, and the destructor
  // removes the old one.
  const bool replaces = fs::exists(fs::symlink_status(complete));
  created_ = rename(partial, complete, replaces);
  try {
    flush_directory(directory_);
  } catch (const FileError&) {
    // The old one keeps its name: the new one may not last.
    if (created_)
      ::renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, complete.c_str(), RENAME_EXCHANGE);
    throw;
  }
  std::error_code ignored;
  if (replaces) fs::remove_all(fs::path(complete).concat(kOld), ignored);
}

// Returns whether the partial name is in use afterwards.
bool Staging::rename(const fs::path& partial, const fs::path& complete, bool replaces) const {
  const unsigned flags = replaces ? RENAME_EXCHANGE : 0;
  if (::renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, complete.c_str(), flags) == 0)
    return replaces;
  // NFS and FUSE cannot exchange names.
  std::error_code error(errno, std::system_category());
  if (replaces && (error == std::errc::invalid_argument || error.value() == ENOSYS))
    error = replace_in_two_steps(partial, complete);
  if (!error) return false;
  fail_in(directory_, error.value(),
          replaces ? fmt::format("remove '{}', or save at another step", complete.string()) : "");
}

void Staging::remove(std::int64_t step) const {
  const fs::path complete = complete_path(directory_, step);
  const fs::path partial = partial_path(directory_, step);
  std::error_code error;
  // Renamed first: an incomplete checkpoint never has a complete one's name.
  fs::rename(complete, partial, error);
  if (!error) fs::remove_all(partial, error);
  if (error) {
    log()->warn("[checkpoint.save] expected to remove the old checkpoint '{}', got {}",
                complete.string(), error.message());
  }
}

}  // namespace semitone::checkpoint
