#pragma once

#include "semitone/comm/group.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <vector>

namespace semitone::parallel {

/// Some of a model's gradients on their way to the other ranks.
struct GradientBucket {
  /// The gradients one after the other, flat, in the order of the parameters and in their dtype.
  at::Tensor buffer;
  /// Whose gradients they are; dense, and all of one dtype and device.
  std::vector<at::Tensor> parameters;
  std::size_t index = 0;  ///< in the order in which buckets are reduced, from 0
  bool is_last = false;   ///< of this backward pass
};

/// How gradients are combined over the ranks, in place of the plain mean: for compression, other
/// topologies, statistics.
///
/// Called in the middle of a backward pass, from the thread that runs it, once for each bucket as
/// soon as it is full, in the same order on every rank. It starts the communication and returns;
/// backward goes on meanwhile, and waits for all at its end. (At comm::CheckLevel::full a group
/// compares each call before it starts it, which waits for the other ranks.)
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
  /// @return a future of a tensor like bucket.buffer, or of that very one, that becomes the
  /// gradients: the same on every rank. Nothing that runs when it completes may hold a Group.
  virtual c10::intrusive_ptr<c10::ivalue::Future> reduce(const GradientBucket& bucket,
                                                         const comm::Group& group) = 0;
};

}  // namespace semitone::parallel
