#pragma once

#include "semitone/comm/group.h"
#include "semitone/parallel/ddp_options.h"
#include "semitone/parallel/replica_sync.h"
#include "semitone/parallel/wrapped_model.h"

#include <torch/nn/module.h>

#include <concepts>
#include <functional>
#include <type_traits>
#include <utility>

namespace semitone::parallel {

/// Trains one model on several processes, each with its share of the data: the same weights
/// everywhere, and gradients that are the mean over all ranks, reduced while backward still runs.
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
/// Construction makes the parameters and buffers of all ranks equal to rank 0's, and after
/// amp::initialize their fp32 master weights, which keep their lower bits. Before that it
/// verifies that all ranks have the same model: a difference in number, name, shape, strides, dtype
/// or requires_grad of the parameters is an Error on every rank that names rank and parameter.
/// Error, too, for a model without parameters that need gradients, for tensors on a device that the
/// group's backend does not serve, and for options that exclude each other.
///
/// It is a handle on the model, not a copy: optimizers, amp::initialize (before this) and checkpoints
/// work on the model itself, and its parameters' gradients are the means after backward. Dtypes,
/// devices and requires_grad stay as they are from then on. `ddp->` is the model, for all but
/// forward: a backward pass of a forward that did not go through ddp.forward() is an Error (with
/// delay_allreduce from the second step on it is reduced as well). Backward passes must be done
/// before it is destroyed.
///
/// Errors, besides those of forward and backward themselves:
/// - CommError, naming the rank, out of forward or backward if a rank is lost; see comm::Group.
/// - Error at the next forward, naming them, if parameters got no gradient in a backward pass:
///   see DdpOptions::find_unused_parameters, static_graph, delay_allreduce.
///
/// All ranks must call forward and backward equally often: see join and no_sync. A rank may try a step
/// again whose forward or backward threw, if it clears the gradients: the next forward stands for the
/// one that failed, and the others wait. Error at that forward if part of the gradients had been sent:
/// with delay_allreduce none are before backward is done, else a bucket is when it is full.
/// torch::autograd::grad does not reduce anything. With a group of one process it does nothing but call the model.
///
/// @tparam Model  a module holder (Net), a std::shared_ptr to a module, or torch::jit::Module. A module
/// that is an object itself (struct Net : torch::nn::Module; Net model;) is taken by reference and has
/// to outlive this.
template <typename Model>
class DistributedDataParallel : public WrappedModel<Model> {
 public:
  DistributedDataParallel(Model model, comm::Group group, const DdpOptions& options = {})
      : WrappedModel<Model>(std::move(model)),
        sync_(tensors_of(this->module()), std::move(group), options) {}

  /// The model's forward, whatever it takes and returns; a TorchScript one takes IValues, or what
  /// becomes one. Not for two threads at a time.
  template <typename... Arguments>
  auto forward(Arguments&&... arguments) {
    sync_.before_forward();
    const auto run = [&] {
      return this->call(this->module(), std::forward<Arguments>(arguments)...);
    };
    if constexpr (std::is_void_v<decltype(run())>) {
      run();
      sync_.after_forward();
    } else {
      return sync_.after_forward(run());
    }
  }
  template <typename... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  /// Gradient accumulation: forwards in the scope of the result, and their backward passes, add to
  /// each rank's own gradients. The next backward of a forward outside of it reduces the sum, with
  /// MixedPrecision::scale_loss too, so the gradients must be in the parameters then.
  ///
  ///     { const auto local = ddp.no_sync(); loss_of(ddp.forward(first)).backward(); }
  ///     loss_of(ddp.forward(second)).backward();
  ///
  /// Error if a backward pass outside of it adds gradients of forwards from both sides, the one outside
  /// first. Backward passes without ddp.forward() are allowed in it, too: for terms that are the same on
  /// all ranks, such as penalties on the parameters.
  NoSync no_sync() { return sync_.no_sync(); }

  /// Runs a training loop in which ranks may have different numbers of batches: a rank that is done
  /// takes part in the others' reductions with zeros until all are done, and may follow their steps
  /// (JoinOptions::follow), which the optimizer's state needs. At the end all ranks have the model
  /// of those that were last. Costs two small messages more in each step. The loop must not call any
  /// other collectives, and SyncBatchNorm's layers are such; its exceptions go on, and the rank
  /// leaves the group. Error with static_graph and with sparse gradients.
  void join(const std::function<void()>& loop, const JoinOptions& options = {}) {
    sync_.join(loop, options);
  }

  const comm::Group& group() const { return sync_.group(); }

 private:
  ReplicaSync sync_;
};

template <std::derived_from<torch::nn::Module> Module>
DistributedDataParallel(Module&, comm::Group, const DdpOptions& = {})
    -> DistributedDataParallel<std::reference_wrapper<Module>>;

}  // namespace semitone::parallel
