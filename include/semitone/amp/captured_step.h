#pragma once

#include "semitone/amp/mixed_precision.h"
#include "semitone/optim/fused_optimizer.h"

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace semitone::amp {

/// Options of a CapturedStep.
struct CapturedStepOptions {
  /// Steps that run operator by operator before one is captured, so that libraries have chosen their
  /// algorithms and memory is there. At least 1. Default 3, as torch.cuda.make_graphed_callables.
  TORCH_ARG(std::int64_t, warmup) = 3;
  /// Clips the norm of all (unscaled) gradients, without a host read. 0: no clipping. Default 0.
  TORCH_ARG(double, max_grad_norm) = 0;
  /// See ScaleLossOptions. Default 0.
  TORCH_ARG(std::int64_t, loss_id) = 0;
};

/// A whole training step — forward, loss, backward, unscaling, clipping, the optimizer — that is
/// captured once in a CUDA graph and then replayed: one launch instead of thousands. What
/// torch.cuda.graph and Apex's capturable optimizers are for, with the loss scale, learning rates
/// and step counts in the device's memory.
///
///     amp::CapturedStep step(mixed, optimizer, [&](const std::vector<at::Tensor>& batch) {
///       return torch::cross_entropy_loss(mixed.forward(model, batch[0]), batch[1]);
///     });
///     for (auto& batch : *loader) {
///       const auto [loss, taken] = step.run({batch.data, batch.target});
///     }
///
/// On a device without graphs (a CPU; LibTorch or Semitone without CUDA) every step runs operator by
/// operator: the same program, with the same results. A step ends as MixedPrecision::step does:
/// skipped if a gradient is not finite, scales moved, counts counted, and no gradients left, also not
/// from before; parameters of other optimizers keep the gradients that they had. So learning rates
/// and weights may change between any two steps, and checkpoints may be written; steps by hand,
/// evaluation and captured steps may follow each other in any order.
///
/// A step is captured again by itself, after one more operator by operator, when parameters, buffers or
/// optimizer state have got other memory (loading an optimizer's state, set_data()), when the
/// optimizer wants other state or has other parameters, or one is frozen or unfrozen. Batches of
/// another shape or dtype than the captured one, such as an epoch's last, run operator by operator.
/// Anything else that a step depends on is frozen when it is captured: branches, numbers of the host,
/// whether layers are in training mode; reset() captures it again.
///
/// What a captured step cannot do: read from the device (item(), printing, nonzero()), or run other
/// operators for other batches. That is an Error from run(), with what LibTorch says, at the first
/// step after warm-up and at each later one; LibTorch may then refuse to draw random numbers on the
/// device. Optimizers: FusedAdam, FusedSGD, FusedAdagrad, with fp32 state and one device;
/// gradients for the same parameters in each step. Ranks do not agree inside of it: no
/// DistributedDataParallel, no found_inf hook.
///
/// One host read a step, of found_inf; none in plain training (a loss scale of 1 and no master
/// weights). Not copyable. One thread at a time.
class CapturedStep {
 public:
  /// Computes the loss of a batch: what is captured. For whatever else it computes, copy_() it,
  /// detached, into a tensor made before: a replay does that too, but assigns no variables.
  using LossFunction = std::function<at::Tensor(const std::vector<at::Tensor>& batch)>;

  /// Error if the optimizer cannot be captured or was not given to amp::initialize, or options make
  /// no sense.
  /// @param mixed, optimizer  must outlive this object, and not be moved
  CapturedStep(MixedPrecision& mixed, optim::FusedOptimizer& optimizer, LossFunction loss,
               const CapturedStepOptions& options = {});
  ~CapturedStep();
  CapturedStep(const CapturedStep&) = delete;
  CapturedStep& operator=(const CapturedStep&) = delete;

  struct Result {
    at::Tensor loss;  ///< detached, on the model's device; yours to keep
    Step step;        ///< taken or skipped
  };
  /// Takes a step with a batch, which is brought to the model's device first. Errors and exceptions
  /// of the loss function, DivergedError too, leave an object that goes on.
  Result run(const std::vector<at::Tensor>& batch);

  /// Whether there is a captured step, which batches like the captured one replay.
  bool is_captured() const;
  /// Forgets the captured step; warms up and captures again.
  void reset();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace semitone::amp
