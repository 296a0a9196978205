#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace semitone::comm {

/// How all_reduce and the other reductions combine the ranks' values. mean is sum / size, computed
/// in the tensor's dtype, which must be floating-point.
enum class ReduceOp { sum, mean, min, max, product };

/// A collective in progress. Copies refer to the same collective.
class Work {
 public:
  /// Waits until the collective is done; with nccl, until it is queued on the GPU. Throws CommError
  /// with the rank's number if a rank is lost or late. If the collective has written 16-bit
  /// parameters of a MixedPrecision, their fp32 masters get the same values in the first call.
  void wait();
  /// Returns whether the collective is done, successfully or not; with nccl, whether it is queued.
  bool done() const;
  /// Completes with the tensor or the error, on a thread of the transport. Callbacks run on that
  /// thread. They must not capture a Group: the destructor of the last copy would wait for the
  /// thread on which it runs.
  c10::intrusive_ptr<c10::ivalue::Future> future() const;

 private:
  friend class Group;
  struct State;
  explicit Work(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

/// A set of processes that communicate, as returned by comm::init. It is a handle: copies refer to
/// the same group.
///
/// Every rank of a group must call the same collectives in the same order, with tensors of the same
/// shape and dtype. CheckLevel defines how far this is verified. Tensors must be on device() and,
/// except in a broadcast of many tensors, contiguous. Their dtype must be fp64, fp32, fp16, bf16,
/// int64, int32, int8 or uint8; collectives that do not compute (broadcast, all_gather, gather,
/// scatter, all_to_all, send, recv) accept any dtype. Other tensors are an Error; of the device,
/// only the type is checked. all_reduce, reduce and broadcast work in place, and autograd records
/// no collective.
///
/// With gloo, collectives block until the result is available, unless their names end in _async.
/// All collectives increment the version counters of the tensors that they write. Autograd
/// therefore refuses to use a saved value that was overwritten, and amp updates the fp32 master of
/// a parameter that was written.
///
/// CommError names the rank when a peer dies (raised at once), when it stops or becomes unreachable
/// (after InitOptions::heartbeat_timeout), or when it does not arrive within the timeout. After a
/// lost rank the group and its subgroups are unusable: every call throws the same error. Destroying
/// a group then takes a few seconds at most, whatever the other ranks do. With nccl the destructor
/// first waits for the collectives in progress.
///
/// With nccl, collectives return when they are queued. A lost rank aborts the queued collectives.
/// GPU kernels that wait for them then continue with undefined values, and the next call on the
/// group throws the CommError. A barrier waits for the GPU, and throws the CommError itself.
///
/// Only one thread at a time may use a group. Collectives that overlap in time, on several threads,
/// need one subgroup each.
///
/// A group of one process needs no backend. Group() is such a group, and its collectives return at
/// once.
class Group {
 public:
  Group();

  int rank() const;
  int size() const;
  /// A name that InitOptions::backend lists, or "none" for a single process.
  std::string_view backend() const;
  /// Returns where tensors must be: the CPU, or the GPU that init chose for this rank, if the
  /// backend communicates between GPUs. A group of one process accepts tensors on any device;
  /// device() is then the one that init chose, or the CPU for Group().
  c10::Device device() const;
  std::chrono::milliseconds timeout() const;

  void all_reduce(at::Tensor& tensor, ReduceOp op = ReduceOp::sum) const;

  /// Copies root's values to all ranks.
  void broadcast(at::Tensor& tensor, int root = 0) const;
  /// Broadcasts many tensors, coalesced into buffers of 250 MiB for each dtype. Strides may differ
  /// between ranks.
  void broadcast(const std::vector<at::Tensor>& tensors, int root = 0) const;
  /// Broadcasts a string of any length.
  std::string broadcast(std::string text, int root = 0) const;

  /// Returns every rank's tensor, in rank order. All have the same shape.
  std::vector<at::Tensor> all_gather(const at::Tensor& tensor) const;
  /// Returns every rank's string, in rank order. Lengths may differ.
  std::vector<std::string> all_gather(const std::string& text) const;

  /// Combines the ranks' tensors, and gives each rank one of size() equal parts of the result. The
  /// result is split along dimension 0, whose extent must be a multiple of size().
  at::Tensor reduce_scatter(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum) const;

  /// Combines the ranks' tensors in root's tensor. Those of the other ranks are not changed.
  void reduce(at::Tensor& tensor, int root = 0, ReduceOp op = ReduceOp::sum) const;

  /// Returns every rank's tensor, in rank order, on root, and an empty list on the other ranks. All
  /// have the same shape.
  std::vector<at::Tensor> gather(const at::Tensor& tensor, int root = 0) const;

  /// Copies root's `tensors[r]` to the `tensor` of rank r.
  /// @param tensors  on root: one for each rank, all like `tensor`, Error otherwise. On the other
  /// ranks: ignored
  void scatter(at::Tensor& tensor, const std::vector<at::Tensor>& tensors, int root = 0) const;

  /// Divides the tensor along dimension 0 into size() equal parts, and sends part r to rank r.
  /// Returns the parts that this rank received, concatenated in rank order. The first extent must
  /// be a multiple of size(). torch.distributed: all_to_all_single.
  at::Tensor all_to_all(const at::Tensor& tensor) const;
  /// Like the above, with parts of different extents along dimension 0. The other dimensions must
  /// be equal on all ranks.
  /// @param input_splits  the extent of the part for each rank. Their sum must be the first extent
  /// @param output_splits  the extent of the part from each rank: what that rank has in its
  /// input_splits for this one. CommError on every rank otherwise, except with CheckLevel::none
  at::Tensor all_to_all(const at::Tensor& tensor, const std::vector<std::int64_t>& input_splits,
                        const std::vector<std::int64_t>& output_splits) const;
  /// Sends `inputs[r]` to rank r, which receives it in its `outputs[this rank]`. All tensors have
  /// one dtype. Numbers of elements must agree, as above; shapes may differ.
  /// torch.distributed: all_to_all, which Gloo does not have. Here it is one all_to_all of a
  /// concatenated copy.
  void all_to_all(const std::vector<at::Tensor>& outputs,
                  const std::vector<at::Tensor>& inputs) const;

  /// Sends a tensor to another rank, which calls recv with a tensor of the same shape and dtype.
  /// Blocks until that rank has received it; with nccl, until it is queued. Two ranks that exchange
  /// tensors therefore call all_to_all, or one of them calls recv first. Unless the check is
  /// CheckLevel::none, the two ranks first compare their tensors, and both throw CommError if
  /// these differ. There is no recv from any rank.
  /// @param to  any other rank of the group, Error otherwise
  /// @param tag  equal in both calls, from 0; nccl ignores it. Messages of one tag arrive in order
  void send(const at::Tensor& tensor, int to, int tag = 0) const;
  /// Receives into a tensor what rank `from` sends.
  void recv(at::Tensor& tensor, int from, int tag = 0) const;

  /// Forms that return at once, unless the check is CheckLevel::full. What they write is valid after
  /// Work::wait; until then, neither these tensors nor those that are sent may be changed. Either all
  /// ranks call this form of a collective or all call the other one. torch.distributed: async_op.
  /// Messages have no such form, since Gloo ends the process that gets more than it expects: send and
  /// recv first compare the tensors.
  Work all_reduce_async(at::Tensor& tensor, ReduceOp op = ReduceOp::sum) const;
  Work broadcast_async(at::Tensor& tensor, int root = 0) const;
  /// @param outputs  size() contiguous tensors, each of the shape and dtype of `tensor`. Error
  /// otherwise
  Work all_gather_async(const std::vector<at::Tensor>& outputs, const at::Tensor& tensor) const;
  /// @param output  a contiguous tensor of the dtype of `tensor`, whose first extent is size() times
  /// as large and whose others are equal. Error otherwise
  Work reduce_scatter_async(at::Tensor& output, const at::Tensor& tensor,
                            ReduceOp op = ReduceOp::sum) const;
  /// Exchanges parts of equal extents.
  /// @param output  a contiguous tensor of the shape and dtype of `tensor`. Error otherwise
  Work all_to_all_async(at::Tensor& output, const at::Tensor& tensor) const;

  /// Returns when all ranks have called it.
  void barrier() const;
  /// A barrier with its own timeout. CommError names every rank that did not arrive.
  /// @param timeout  above 24 days: 24 days; below 0: 0
  void monitored_barrier(std::chrono::milliseconds timeout) const;

  /// Returns a group of some of this group's ranks, numbered from 0 in the order of the list.
  /// Errors name ranks by their numbers in the group of all processes, as returned by init. Every
  /// rank of this group calls it with the same list. A rank that is not in the list gets a group of
  /// one process. The others wait for each other: CommError names those that do not come within
  /// InitOptions::timeout.
  /// @param ranks  ascending, without duplicates. Error otherwise.
  Group subgroup(const std::vector<int>& ranks) const;

  /// Splits the group into groups of `size` consecutive ranks: 0 … size-1, size … 2 size-1, and so
  /// on. Returns this rank's group. Error unless `size` divides size(). Apex:
  /// create_syncbn_process_group.
  Group split(int size) const;

  /// For the library itself.
  struct Impl;
  const std::shared_ptr<Impl>& impl() const { return impl_; }
  explicit Group(std::shared_ptr<Impl> impl);

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace semitone::comm
