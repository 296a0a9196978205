#include "src/checkpoint/deferred_copies.h"

#include "semitone/core/error.h"
#include "src/kernels/copy_bytes.h"

#include <c10/util/ParallelGuard.h>

#include <algorithm>
#include <utility>

namespace semitone::checkpoint {
namespace {

[[noreturn]] void refuse_change() {
  throw Error("checkpoint.save_async",
              "parameters and optimizers' states that keep their values until they are copied",
              "a change of one of them",
              "call wait_for_copy() before anything changes them, or do without "
              "CheckpointOptions::copy_in_background");
}

}  // namespace

void copy_all(const std::vector<PendingCopy>& copies) {
  std::vector<kernels::BytesToCopy> parts;
  parts.reserve(copies.size());
  for (const PendingCopy& copy : copies)
    parts.push_back({copy.from.data(), copy.to.mutable_data_ptr(), copy.to.numel()});
  kernels::copy_bytes(parts);
}

DeferredCopies::DeferredCopies(std::vector<PendingCopy> copies) : copies_(std::move(copies)) {
  versions_.reserve(copies_.size());
  for (const PendingCopy& copy : copies_) versions_.push_back(copy.version.current_version());
}

void DeferredCopies::run() {
  const bool same_sizes = std::all_of(copies_.begin(), copies_.end(), [](const PendingCopy& copy) {
    return static_cast<std::int64_t>(copy.from.nbytes()) == copy.to.numel();
  });
  if (same_sizes && !is_changed()) {
    // Other threads would be new ones, in addition to those that train.
    const c10::ParallelGuard without_other_threads(true);
    copy_all(copies_);
  }
  for (PendingCopy& copy : copies_) {
    copy.from = {};
    copy.to.reset();
  }
  if (!same_sizes || is_changed()) refuse_change();
}

bool DeferredCopies::is_changed() const {
  return !std::equal(copies_.begin(), copies_.end(), versions_.begin(),
                     [](const PendingCopy& copy, std::uint32_t version) {
                       return copy.version.current_version() == version;
                     });
}

void DeferredCopies::confirm() {
  if (!is_changed()) is_confirmed_ = true;
}

void DeferredCopies::require_confirmed_if_changed() const {
  // In this order: what changes the tensors after confirm() is allowed.
  if (is_changed() && !is_confirmed_) refuse_change();
}

}  // namespace semitone::checkpoint
