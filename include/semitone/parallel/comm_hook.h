#pragma once

#include "semitone/comm/group.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <vector>

namespace semitone::parallel {

/// Part of a model's gradients, to be reduced over the ranks.
struct GradientBucket {
  /// The gradients, flattened and concatenated in the order of the parameters, in their dtype.
  /// Since LibTorch 2.11, those of complex parameters are real numbers: the real and the imaginary
  /// part of each element, one after the other.
  at::Tensor buffer;
  /// The parameters of these gradients. The gradients are dense, and have one dtype and device.
  std::vector<at::Tensor> parameters;
  std::size_t index = 0;  ///< in the order in which buckets are reduced, from 0
  bool is_last = false;   ///< the last bucket of this backward pass
};

/// Combines gradients over the ranks, in place of the plain mean: for compression, other
/// topologies, statistics.
///
/// A backward pass calls reduce() from its thread, once for each bucket as soon as the bucket is
/// full, in the same order on every rank. reduce() starts the communication and returns. The
/// backward pass continues meanwhile, and waits for all buckets at its end. (At
/// comm::CheckLevel::full each collective is first compared with the other ranks' calls, so
/// reduce() waits for them.)
class CommHook {
 public:
  CommHook() = default;
  CommHook(const CommHook&) = delete;
  CommHook& operator=(const CommHook&) = delete;
  virtual ~CommHook() = default;

  /// Starts the reduction of a bucket.
  ///
  ///     at::Tensor gradients = bucket.buffer;
  ///     return group.all_reduce_async(gradients, comm::ReduceOp::mean).future();
  ///
  /// @param group  of the ranks that share the model
  /// @return a future of a tensor like bucket.buffer, or of bucket.buffer itself, with the combined
  /// gradients. They must be equal on every rank. Callbacks of the future must not capture a Group,
  /// see comm::Work::future.
  virtual c10::intrusive_ptr<c10::ivalue::Future> reduce(const GradientBucket& bucket,
                                                         const comm::Group& group) = 0;
};

}  // namespace semitone::parallel
