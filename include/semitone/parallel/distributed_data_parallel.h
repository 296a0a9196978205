#pragma once

#include "semitone/comm/group.h"
#include "semitone/parallel/detail/replica_sync.h"
#include "semitone/parallel/detail/wrapped_model.h"
#include "semitone/parallel/distributed_data_parallel_options.h"
#include "semitone/parallel/gradient_order.h"
#include "semitone/parallel/no_sync.h"

#include <torch/nn/module.h>

#include <concepts>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>

namespace semitone::parallel {

/// Trains one model on several processes, each with its share of the data. All processes have the
/// same weights. Gradients are averaged over all ranks, while the backward pass is still running.
///
///     const auto group = comm::init();
///     Net model;
///     parallel::DistributedDataParallel ddp(model, group);
///     torch::optim::SGD optimizer(model->parameters(), 0.1);
///     for (auto& batch : *loader) {  // this rank's share
///       optimizer.zero_grad();
///       loss_of(ddp.forward(batch.data), batch.target).backward();
///       optimizer.step();
///     }
///
/// The constructor makes the parameters and buffers of all ranks equal to rank 0's, and after
/// amp::initialize also the fp32 master weights, not only their 16-bit roundings. First it verifies
/// that all ranks have the same model. A difference in number, name, shape, strides, dtype or
/// requires_grad of the parameters is an Error on every rank, and the message names the differing
/// rank and parameter. It is also an Error if no parameter needs gradients, if tensors are on a
/// device that the group's backend does not support, if Gloo cannot add up a parameter's gradient
/// (float8; before LibTorch 2.11 also complex) and there is no comm_hook, or if options exclude
/// each other.
///
/// It is a handle on the model, not a copy. Optimizers, amp::initialize (to be called before this
/// constructor) and checkpoints use the model itself, and after backward its parameters' gradients
/// are the means. Do not change dtypes, devices or requires_grad afterwards; a parameter that is
/// unfrozen is an Error of the next forward. So is a parameter that the model did not have at
/// construction, as of a layer that is registered or replaced later, also by forward itself: no
/// rank would send it or its gradient. A buffer that has another size or dtype than at construction
/// is an Error of a forward that broadcasts buffers. `ddp->` is the model, for everything except
/// forward. A backward pass of a forward that did not go through ddp.forward() is an Error, except
/// with delay_allreduce. All backward passes must have ended before the object is destroyed.
///
/// With delay_allreduce, the model's own forward may be called instead, in all steps, so that
/// functions that take the model need no change:
///
///     parallel::DistributedDataParallel ddp(
///         model, group, parallel::DistributedDataParallelOptions().delay_allreduce(true));
///     train(model, *loader, optimizer);  // as before: model->forward(…), loss.backward()
///
/// While this object exists, the gradients of each backward pass that reaches the model are
/// reduced, so all ranks must call backward equally often. They stay local if backward runs in the
/// scope of no_sync(), wherever forward ran. Three things need ddp.forward(), and without it
/// backward throws Error: the synchronisation of buffers (with broadcast_buffers(false), each rank
/// keeps its own), the repetition of a step that threw, and join. Missing synchronisation is not
/// detected if a ddp.forward() outside of no_sync() has sent the buffers since the weights changed
/// last: a backward pass of the model's own forward is then taken for another one of that forward.
/// The steps of LibTorch's optimizers do not count as changes, since they write to Tensor::data().
///
/// In addition to the errors of forward and backward themselves:
/// - forward and backward throw CommError, naming the rank, if a rank is lost. With nccl a later
///   call on the group may throw it instead; see comm::Group.
/// - A second backward pass of one forward is an Error, also for other parameters than the first:
///   the gradients of the first are not reduced yet. Add the losses, or use delay_allreduce(true).
/// - If a parameter got no gradient in a backward pass, the next forward throws an Error that names
///   it. See DistributedDataParallelOptions::find_unused_parameters, static_graph, delay_allreduce.
///   A backward pass that reaches none of the parameters is taken for a skipped step, and is not
///   reported.
///
/// All ranks must call forward and backward equally often; see join and no_sync. If forward or
/// backward throws, a rank may repeat the step after clearing the gradients: the next forward
/// replaces the failed one, and the other ranks wait. That forward throws Error if part of the
/// gradients had been sent already. With delay_allreduce no gradient is sent before backward is
/// done; otherwise a bucket is sent when it is full. With delay_allreduce a rank may also repeat
/// backward alone, if it has kept the graph; otherwise the repeated backward throws. Gradients that
/// torch::autograd::grad returns are not reduced. With a group of one process, forward only calls
/// the model.
///
/// @tparam Model  a module holder (Net), a std::shared_ptr to a module, or torch::jit::Module. A
/// module object (struct Net : torch::nn::Module; Net model;) is taken by reference and must
/// outlive this object.
template <typename Model>
class [[nodiscard]] DistributedDataParallel : public detail::WrappedModel<Model> {
 public:
  DistributedDataParallel(Model model, comm::Group group,
                          const DistributedDataParallelOptions& options = {})
      : detail::WrappedModel<Model>(std::move(model)),
        sync_(detail::tensors_of(this->module()), std::move(group), options) {}

  /// Runs the model's forward, with any arguments and results. A TorchScript module takes IValues,
  /// or arguments that convert to them. Use it from one thread at a time.
  template <typename... Arguments>
  auto forward(Arguments&&... arguments) {
    sync_.before_forward();
    const auto run = [&] {
      return this->call(this->module(), std::forward<Arguments>(arguments)...);
    };
    if constexpr (std::is_void_v<decltype(run())>) {
      run();
      sync_.require_no_new_parameters(this->module());
      sync_.after_forward();
    } else {
      auto output = run();
      sync_.require_no_new_parameters(this->module());
      return sync_.after_forward(std::move(output));
    }
  }
  template <typename... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  /// Gradient accumulation: while the returned object exists, backward passes of forwards made
  /// during that time add to each rank's own gradients. The next backward pass of a forward outside
  /// of that time reduces the sum of these gradients and its own, also with
  /// MixedPrecision::scale_loss. Do not clear the gradients in between.
  ///
  ///     { const auto local = ddp.no_sync(); loss_of(ddp.forward(first)).backward(); }
  ///     loss_of(ddp.forward(second)).backward();
  ///
  /// Call backward of earlier forwards before the first forward of that time. Otherwise each
  /// backward pass after that time is an Error, until the next ddp.forward(). During that time,
  /// backward passes without ddp.forward() are allowed too: for terms that are equal on all ranks,
  /// such as penalties on the parameters.
  ///
  /// With delay_allreduce, a backward pass after that time stays local only if it is the first
  /// since the last forward of that time. Others are reduced, as those of the model's own forward.
  /// So call backward during that time if there are several passes, or add up their losses.
  NoSync no_sync() { return sync_.no_sync(); }

  /// Runs a training loop in which ranks may have different numbers of batches. A rank without
  /// batches left takes part in the others' reductions with zeros until all are done, and may
  /// follow their steps (JoinOptions::follow), which keeps its optimizer state equal. At the end
  /// all ranks have the model of the ranks that finished last. Each step costs two additional small
  /// messages, and a third one if buffers are broadcast. The loop must not call other collectives,
  /// as SyncBatchNorm layers would. An exception of the loop propagates, and the rank leaves the
  /// group. Each forward must have one backward pass, and gradients must be cleared between steps
  /// (or accumulated in no_sync), since those that are left would be averaged again. All ranks that
  /// have a batch must be in no_sync in the same steps, and no rank may end its loop with gradients
  /// of no_sync that the others' next step would not include: otherwise Error on every rank. Error
  /// with static_graph, with sparse gradients, and for a second backward pass of a forward.
  void join(const std::function<void()>& loop, const JoinOptions& options = {}) {
    sync_.join(loop, options);
  }

  /// Returns the order in which gradients are summed, for a later start of the training.
  /// Checkpoint::add(name, ddp) saves and restores it. Returns std::nullopt before the first
  /// backward pass that reduces gradients has ended, unless an order was set. Also returns
  /// std::nullopt if every start has the same order: with one rank, delay_allreduce, or
  /// find_unused_parameters without static_graph. Until the next forward, the order after the first
  /// step is that of this rank's gradients. That forward takes rank 0's.
  std::optional<GradientOrder> gradient_order() const { return sync_.gradient_order(); }

  /// Sets the order in which gradients are summed in all steps. Collective: call it on all ranks,
  /// before the first forward whose gradients will be reduced. Without this call, the first step
  /// determines the order. std::nullopt withdraws an order before that forward. Ignored if every
  /// start has the same order, see gradient_order.
  ///
  /// Error on every rank, with nothing changed, if the order is not one of this model's trained
  /// parameters and their dtypes, if it comes from other bucket sizes, if it is set after that
  /// forward and differs from the present one, or if the ranks have not set the same order. The
  /// message names the ranks.
  void set_gradient_order(const std::optional<GradientOrder>& order) {
    sync_.set_gradient_order(order);
  }

  const comm::Group& group() const { return sync_.group(); }

 private:
  detail::ReplicaSync sync_;
};

template <std::derived_from<torch::nn::Module> Module>
DistributedDataParallel(Module&, comm::Group, const DistributedDataParallelOptions& = {})
    -> DistributedDataParallel<std::reference_wrapper<Module>>;

}  // namespace semitone::parallel
