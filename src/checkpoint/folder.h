#pragma once

// Internal interface: other rooms include this header.

#include "src/core/descriptor.h"

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// The directory of a run's checkpoints. It has directories of two kinds: "step-00000120", which are
// complete, and "step-00000120.partial", which a process is writing or deleting, or was when it
// ended. A checkpoint becomes complete by a rename, and stops being one by a rename.
//
// A process that saves locks the directory (flock). On NFS, Linux keeps locks of directories to the
// machine: processes of two machines do not see each other's.
namespace semitone::checkpoint {

std::filesystem::path complete_path(const std::filesystem::path& directory, std::int64_t step);
std::filesystem::path partial_path(const std::filesystem::path& directory, std::int64_t step);

// The steps of complete checkpoints, ascending; none if the directory does not exist. FileError if
// it cannot be listed.
std::vector<std::int64_t> steps_in(const std::filesystem::path& directory);

// The same where a run is resumed: a checkpoint that a killed process was about to replace gets its
// name back, unless another process is saving. Does not keep others from saving, except while there
// is such a checkpoint.
std::vector<std::int64_t> steps_to_resume_in(const std::filesystem::path& directory);

// A checkpoint that is being written, by one process at a time. The destructor removes it unless it
// is complete.
class Staging {
 public:
  // Creates the directory of the checkpoints. A checkpoint that a killed process was about to replace
  // gets its name back. FileError if it cannot, or if another process is saving there.
  explicit Staging(std::filesystem::path directory);
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging();

  // Removes what killed processes left, and creates the partial directory of the step. FileError if
  // it cannot.
  void begin(std::int64_t step);

  // Makes the checkpoint complete. It replaces one of the same step. FileError if it cannot.
  void commit();

  // Removes the checkpoint of a step. A failure is logged: the new checkpoint is complete.
  void remove(std::int64_t step) const;

 private:
  void take_lock();
  [[noreturn]] void fail_beside_another() const;
  void remove_partial() const;
  bool rename(const std::filesystem::path& partial, const std::filesystem::path& complete,
              bool replaces) const;

  std::filesystem::path directory_;
  std::int64_t step_ = 0;
  // The directory, opened and locked: the system removes the lock when the process ends.
  Descriptor lock_;
  bool created_ = false;
  std::optional<std::pair<dev_t, ino_t>> identity_;  // of the partial directory
};

}  // namespace semitone::checkpoint
