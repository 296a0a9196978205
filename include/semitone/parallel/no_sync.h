#pragma once

#include <memory>
#include <utility>

namespace semitone::parallel {

/// Returned by DistributedDataParallel::no_sync: while it exists, backward passes of forwards made
/// during that time accumulate gradients on each rank without communication.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(std::shared_ptr<int> depth) : depth_(std::move(depth)) { ++*depth_; }
  NoSync(NoSync&&) noexcept = default;
  NoSync& operator=(NoSync&&) = delete;
  ~NoSync() {
    if (depth_ != nullptr) --*depth_;
  }

 private:
  std::shared_ptr<int> depth_;
};

}  // namespace semitone::parallel
