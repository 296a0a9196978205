#pragma once

#include "semitone/amp/detail/gradient_sums.h"
#include "semitone/amp/mixed_precision.h"
#include "semitone/core/error.h"
#include "semitone/core/events.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

namespace semitone::amp {

namespace detail {

// No wrapper: nothing to keep from communicating.
struct NoCommunication {
  struct Nothing {};
  Nothing no_sync() { return {}; }
};

}  // namespace detail

/// A wrapper of a model that communicates gradients in backward, such as
/// parallel::DistributedDataParallel: while the result of no_sync() exists, it does not.
template <typename T>
concept CommunicatesGradients = requires(T& wrapper) { wrapper.no_sync(); };

/// Gradient accumulation: back-propagates the mean loss of several micro-batches, as one batch of
/// all of them would, in the memory of one. Returns the mean of the losses, without a gradient, on
/// their device; nothing is read from it.
///
///     for (auto& batch : loader) {
///       const auto parts = batch.data.chunk(4);  // a small batch gives fewer
///       const auto targets = batch.target.chunk(4);
///       amp::accumulate(mixed, optimizer, parts.size(), [&](std::int64_t i) {
///         return loss_of(mixed.forward(model, parts[i]), targets[i]);
///       });
///       mixed.step(optimizer);
///       mixed.zero_grad(optimizer);
///     }
///
/// Each loss is divided by `micro_batches`, in fp32 (fp64 for an fp64 loss), scaled, and
/// back-propagated. Gradients are unscaled after each backward pass, added in fp32, and checked for
/// inf and NaN (except in plain training, see MixedPrecision::step): an overflow in any micro-batch
/// makes step() skip. They are added to gradients that exist already. The loss scale is updated once,
/// by step().
///
/// 16-bit gradients (at O3, with split masters), unless they are sparse, are rounded in each
/// micro-batch, as they are there without accumulation: in fp16, what is below 6e-8 once it is
/// unscaled and divided becomes 0. Their sum is kept in fp32, rounded before the last micro-batch,
/// and again with it. If there are more than two, it needs 4 bytes for each element until then.
/// Those of other optimizers than this one are added in 16 bits.
///
/// The result is the mean of the micro-batches' means. It is the mean over all samples if the
/// micro-batches have the same size. Otherwise, and for losses that count tokens, return
/// `loss_sum * micro_batches / total`, with the total over all micro-batches. Batch norm computes
/// its statistics from each micro-batch.
///
/// Error, before anything is computed, if micro_batches is below 1. If loss_of or a backward pass
/// throws, the exception propagates, and the gradients of earlier micro-batches remain: call
/// mixed.zero_grad(optimizer) before the batch is repeated.
/// @param micro_batches  their number, at least 1
/// @param loss_of  called with 0, 1, …, micro_batches - 1: runs forward, and returns the mean loss of
///                 this micro-batch, a scalar
/// @param options  of each scale_loss; delay_unscale does not count for the last one
template <typename LossOf>
  requires(std::invocable<LossOf&, std::int64_t>)
at::Tensor accumulate(MixedPrecision& mixed, torch::optim::Optimizer& optimizer,
                      std::int64_t micro_batches, LossOf&& loss_of,
                      const ScaleLossOptions& options = {}) {
  detail::NoCommunication alone;
  return accumulate(mixed, optimizer, alone, micro_batches, std::forward<LossOf>(loss_of), options);
}

/// The same with a wrapper that communicates gradients. Only the last micro-batch does, for the
/// gradients of all. loss_of runs the wrapper's forward: `mixed.forward(ddp, parts[i])`. All ranks
/// need the same number of micro-batches.
template <CommunicatesGradients Wrapper, typename LossOf>
  requires(std::invocable<LossOf&, std::int64_t>)
at::Tensor accumulate(MixedPrecision& mixed, torch::optim::Optimizer& optimizer, Wrapper& wrapper,
                      std::int64_t micro_batches, LossOf&& loss_of,
                      const ScaleLossOptions& options = {}) {
  if (micro_batches < 1)
    throw Error("amp.accumulate", "at least 1 micro-batch", std::to_string(micro_batches));
  at::Tensor mean;
  const auto forward = [&](std::int64_t index) -> at::Tensor {
    const events::PhaseScope phase(events::Phase::forward);
    return loss_of(index);
  };
  const auto run = [&](std::int64_t index, const at::Tensor& factor, const ScaleLossOptions& how) {
    const at::Tensor loss = forward(index);
    const auto dtype = loss.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor share = loss.to(dtype).div(micro_batches);
    const at::Tensor checked = factor.defined() ? share * factor.to(share.device(), dtype) : share;
    mixed.scale_loss(checked, optimizer, how).backward();
    mean = mean.defined() ? mean.add(share.detach()) : share.detach();
  };
  detail::GradientSums sums(optimizer);
  for (std::int64_t i = 0; i + 1 < micro_batches; ++i) {
    [[maybe_unused]] const auto local = wrapper.no_sync();
    run(i, {}, options);
    if (micro_batches > 2) sums.take();  // otherwise one addition, rounded once
  }
  // Before the last one, which reduces all of them over ranks. A sum that overflows in 16 bits makes
  // its gradients NaN, so that the step is skipped, on all ranks.
  run(micro_batches - 1, sums.put_back(), ScaleLossOptions(options).delay_unscale(false));
  return mean;
}

}  // namespace semitone::amp
