#pragma once

#include "src/core/descriptor.h"

#include <filesystem>

namespace semitone::train {

// Keeps other trainings from a directory of checkpoints: a file "training.lock" in it, with a lock
// that the system removes if the process is killed. Trainings on other machines see it if the file
// system's locks are for all machines (as those of NFS are).
class RunLock {
 public:
  // Creates the directory. FileError if another training has it. Without permission to write there,
  // on a file system without locks, or if the file cannot be made, there is no lock.
  explicit RunLock(const std::filesystem::path& directory);
  // Removes the file, and the directory if it was created and is still empty.
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  // Whether the file that it opened is locked and still has its name. Then the lock is this one's.
  bool take();

  std::filesystem::path directory_;
  std::filesystem::path path_;
  bool created_ = false;  // the directory
  Descriptor file_;       // locked
};

}  // namespace semitone::train
