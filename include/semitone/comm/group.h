#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace semitone::comm {

/// How all_reduce and its kin combine the ranks' values. mean is sum / size in the tensor's dtype,
/// which must be floating-point.
enum class ReduceOp { sum, mean, min, max, product };

/// A collective under way. Copies refer to the same one.
class Work {
 public:
  /// Waits until it is done. CommError if a rank is lost or late, with the rank's number.
  void wait();
  /// Whether it is done, well or not.
  bool done() const;
  /// Completes with the tensor, or with the error, on a thread of the transport. Nothing that runs
  /// then may hold a Group.
  c10::intrusive_ptr<c10::ivalue::Future> future() const { return future_; }

 private:
  friend class Group;
  explicit Work(c10::intrusive_ptr<c10::ivalue::Future> future) : future_(std::move(future)) {}
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// A set of processes that communicate: what comm::init returns. A handle: copies refer to the same
/// group.
///
/// Every rank of a group has to call the same collectives in the same order, with tensors of the
/// same shape and dtype, which is verified (CheckLevel). Tensors must be contiguous, and on a
/// device that the backend serves: the CPU for gloo, CUDA for nccl. Their dtype is one of fp64,
/// fp32, fp16, bf16, int64, int32, int8, uint8 and, for broadcast and all_gather, any. Error for a
/// tensor that is not so. Collectives work in place, outside autograd, and block until the result
/// is there unless their name ends in _async. What they write counts as changed in place: autograd
/// refuses to use a saved value that is gone, and fp32 master weights follow their parameters.
///
/// CommError, naming the rank, when a peer dies (at once), stops or cannot be reached (after
/// InitOptions::heartbeat_timeout), or does not come within the timeout. After the loss of a rank
/// the group and its subgroups are of no more use: every call throws the same error. Destroying a
/// group takes seconds at most after a loss, whatever state the other ranks are in; with nccl it waits
/// for the collectives under way before.
///
/// With nccl, collectives return when they are queued. A loss aborts what is queued, so that what waits
/// for the GPU goes on, with values that mean nothing; the CommError is the next call's, or the
/// barrier's.
///
/// One thread at a time may use a group. Collectives that overlap in time, on several threads, need
/// a subgroup each.
///
/// A group of one process needs no backend: Group() is that, and every collective returns at once.
class Group {
 public:
  Group();

  int rank() const;
  int size() const;
  /// "gloo", "nccl", or "none" for a single process.
  std::string_view backend() const;
  /// Where tensors have to be: the CPU for gloo; for nccl this rank's GPU, as init chose it. A single
  /// process takes any tensors; its device is that which several would have, or the CPU for Group().
  c10::Device device() const;
  std::chrono::milliseconds timeout() const;

  void all_reduce(at::Tensor& tensor, ReduceOp op = ReduceOp::sum) const;
  /// The same, but returns at once, unless the check is CheckLevel::full. All ranks call this one,
  /// or all call all_reduce.
  Work all_reduce_async(at::Tensor& tensor, ReduceOp op = ReduceOp::sum) const;

  /// Copies root's values to all ranks.
  void broadcast(at::Tensor& tensor, int root = 0) const;
  /// The same for many tensors, coalesced into buffers of 250 MiB a dtype. Their strides do not
  /// matter.
  void broadcast(const std::vector<at::Tensor>& tensors, int root = 0) const;
  /// A text of any length.
  std::string broadcast(std::string text, int root = 0) const;

  /// Every rank's tensor, by rank; all of one shape.
  std::vector<at::Tensor> all_gather(const at::Tensor& tensor) const;
  /// Every rank's text, by rank; any lengths.
  std::vector<std::string> all_gather(const std::string& text) const;

  /// Combines the ranks' tensors, and gives each rank one of size() equal parts of the result, cut
  /// along dimension 0, whose extent must be a multiple of size().
  at::Tensor reduce_scatter(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum) const;

  /// Returns when all ranks have called it.
  void barrier() const;
  /// The same, with a deadline of its own; CommError names every rank that did not come.
  void monitored_barrier(std::chrono::milliseconds timeout) const;

  /// A group of some of this one's ranks, numbered from 0 in this order; errors name ranks by their
  /// numbers in the group of all. Every rank of this group calls it with the same list; ranks that
  /// are not on it get a group of their own (Group()).
  /// @param ranks  ascending, without repetition. Error otherwise.
  Group subgroup(const std::vector<int>& ranks) const;

  /// Groups of `size` neighbours each: ranks 0 … size-1, size … 2 size-1, and so on; this rank's is
  /// returned. Error unless the size divides this group's. Apex: create_syncbn_process_group.
  Group split(int size) const;

  /// For the library itself.
  struct Impl;
  const std::shared_ptr<Impl>& impl() const { return impl_; }
  explicit Group(std::shared_ptr<Impl> impl);

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace semitone::comm
