#pragma once

#include "semitone/amp/mixed_precision.h"
#include "semitone/optim/fused_optimizer.h"
#include "semitone/scaling/step.h"

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace semitone::amp {

/// Options of a CapturedStep.
struct CapturedStepOptions {
  /// Number of steps that run operator by operator before a step is captured, so that libraries
  /// select their algorithms and allocate memory. At least 1. Default 3, as in
  /// torch.cuda.make_graphed_callables.
  TORCH_ARG(std::int64_t, warmup) = 3;
  /// Largest norm of all unscaled gradients together. Larger gradients are clipped, without a host
  /// read. 0: no clipping. Default 0.
  TORCH_ARG(double, max_grad_norm) = 0;
  /// Index of the loss scaler, see ScaleLossOptions. Default 0.
  TORCH_ARG(std::int64_t, loss_id) = 0;
};

/// Captures a whole training step once in a CUDA graph and then replays it: one launch instead of
/// thousands. The step consists of forward, loss, backward, unscaling, clipping and the optimizer.
/// torch.cuda.graph and Apex's capturable optimizers serve the same purpose. Loss scale, learning
/// rates and step counts are in the device's memory.
///
///     amp::CapturedStep step(mixed, optimizer, [&](const std::vector<at::Tensor>& batch) {
///       return torch::cross_entropy_loss(mixed.forward(model, batch[0]), batch[1]);
///     });
///     for (auto& batch : *loader) {
///       const auto [loss, outcome] = step.run({batch.data, batch.target});
///     }
///
/// On a device without graphs every step runs operator by operator, with the same results: on a
/// CPU, and with a LibTorch without CUDA or a Semitone without CUDA kernels. A step ends like
/// MixedPrecision::step: it is skipped if a gradient is not finite (except in plain training), and
/// scales and counters are updated. Afterwards the optimizer's parameters have no gradients, not
/// even those from before the call. Gradients of parameters that belong to other optimizers are
/// left unchanged. Learning rates and weights may change between any two steps, and checkpoints may
/// be written. Captured steps, ordinary steps and evaluation may follow each other in any order.
///
/// These changes cause a new capture, after one step that runs operator by operator:
/// - parameters, buffers or optimizer state move to other memory (after loading an optimizer's
///   state, or set_data());
/// - the optimizer needs other state or has other parameters;
/// - a parameter is frozen or unfrozen;
/// - the rule of the loss scale changes (after MixedPrecision::load()).
///
/// Batches whose shape or dtype differs from the captured one, such as an epoch's last batch, run
/// operator by operator. Everything else that a step depends on is fixed at capture: branches,
/// numbers on the host, the training mode of layers. Call reset() to capture again.
///
/// A captured step cannot read from the device (item(), printing, nonzero()). Reading is an Error
/// from run(), with LibTorch's message, at the first step after the warm-up and at each later one.
/// All fused optimizers are supported, with fp32 state on one device. The same parameters must have
/// gradients in each step. Ranks cannot agree within a captured step: on a device with graphs,
/// found_inf hooks are an Error, and with several ranks so is the forward of a
/// parallel::DistributedDataParallel or a parallel::SyncBatchNorm, from the first step on.
///
/// Captured steps read nothing from the device. The device skips a step if a gradient is not finite,
/// and updates the loss scale itself, by the same rule and with the same results as the host. The
/// host follows one step behind: when run() has launched a step, it waits for the outcome of the
/// step before, and updates scales, counters and step counts. The device meanwhile works on the
/// launched step. The outcome of the last step is known when it is used, or after any function of
/// MixedPrecision or of the optimizer that depends on it, such as save(), skipped_steps() and
/// loss_scaler(). These functions wait for the step. The log reports a skipped step when the host
/// learns of it, without the name of a parameter.
///
/// With an event listener, or with max_consecutive_skips, run() reads found_inf once at the end of
/// each step instead. Events, logs and errors can then name the parameter that overflowed, before
/// the next step overwrites its gradient. Steps that run operator by operator read what
/// MixedPrecision::step reads. Not copyable. Use it from one thread at a time.
class CapturedStep {
 public:
  /// Computes the loss of a batch. This function is captured. To get other results out of it,
  /// copy_() them, detached, into a tensor that already exists: a replay repeats the copy, but not
  /// assignments to variables.
  using LossFunction = std::function<at::Tensor(const std::vector<at::Tensor>& batch)>;

  /// Error if the optimizer was not passed to amp::initialize, if options are invalid, or, on a
  /// device with graphs, if the optimizer cannot be captured.
  /// @param mixed, optimizer  must outlive this object, and must not be moved
  CapturedStep(MixedPrecision& mixed, optim::FusedOptimizer& optimizer, LossFunction loss,
               const CapturedStepOptions& options = {});
  ~CapturedStep();
  CapturedStep(const CapturedStep&) = delete;
  CapturedStep& operator=(const CapturedStep&) = delete;

  struct Result {
    at::Tensor loss;  ///< detached, on the model's device; later steps do not overwrite it
    StepResult step;  ///< stepped or skipped; waits if it is used before the next run()
  };
  /// Takes a step with a batch, which is moved to the model's device first. After an Error
  /// (DivergedError included) or an exception of the loss function, the object remains usable.
  Result run(const std::vector<at::Tensor>& batch);

  /// Returns whether a step is captured. Batches like the captured one then replay it.
  bool is_captured() const;
  /// Drops the captured step. The next steps warm up and capture again.
  void reset();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace semitone::amp
