#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace semitone::checkpoint {

// A storage that has not been copied yet, and the memory for its copy.
struct PendingCopy {
  c10::Storage from;
  at::Tensor to;                 // bytes
  c10::VariableVersion version;  // of a tensor with this storage
};

// Copies the values on the CPU.
void copy_all(const std::vector<PendingCopy>& copies);

// Copies that are left to another thread, which makes them while the program goes on. Versions show
// whether the tensors have kept their values. An operator raises the version when it has written: a
// change that began before the copy may become visible after it, so versions are compared again
// before the checkpoint is complete.
class DeferredCopies {
 public:
  explicit DeferredCopies(std::vector<PendingCopy> copies);

  bool is_empty() const { return copies_.empty(); }

  // Copies, in this thread alone, and releases the storages. Called once. Error if a tensor has been
  // changed in place or resized since the constructor was called.
  void run();

  // Notes that the thread which changes the tensors has waited for run(), unless it had changed them
  // before.
  void confirm();

  // Error if a tensor has been changed without confirm(). In the thread of run(), after it.
  void require_confirmed_if_changed() const;

 private:
  bool is_changed() const;

  std::vector<PendingCopy> copies_;      // without memory after run()
  std::vector<std::uint32_t> versions_;  // when the constructor was called
  std::atomic<bool> is_confirmed_ = false;
};

}  // namespace semitone::checkpoint
