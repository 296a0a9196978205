#pragma once

#include "semitone/data/prefetch_options.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace semitone::data::detail {

class Mover;

/// A batch of any type on its way to the training.
struct Fetched {
  std::shared_ptr<void> batch;  ///< null at the end of a pass
  std::vector<at::Tensor> tensors;
};

/// PrefetchLoader without the types of its loader and its batches.
class Prefetcher {
 public:
  /// Reads the next batch of the loader, and moves its tensors.
  using Fetch = std::function<Fetched()>;

  explicit Prefetcher(const PrefetchOptions& options);
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;
  /// Ends the pass.
  ~Prefetcher();

  /// Returns a tensor of the loader on the device, in the dtype and memory format. Called by
  /// Fetch.
  at::Tensor move(const at::Tensor& tensor) const;

  /// Ends the pass: waits until Fetch returns, and drops the batches that were read ahead.
  void stop();
  /// Begins a pass, after stop().
  void start(Fetch fetch);
  /// Returns the next batch, or null at the end. Work on this thread's current stream follows the
  /// batch's copies. Throws what Fetch threw for this batch; the pass is then over.
  std::shared_ptr<void> next();

  const PrefetchOptions& options() const;

 private:
  class Pass;

  std::unique_ptr<const Mover> mover_;
  std::unique_ptr<Pass> pass_;
};

}  // namespace semitone::data::detail
