#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace semitone::optim {

/// The norm of all gradients together, as if they were one vector, in fp64. One pass over the
/// gradients in vector code, which adds up in a fixed order whatever the number of threads.
/// Parameters without a gradient do not count, one that is named twice counts once; 0 if there is
/// no gradient. Inf or NaN if a gradient is: the norm also tells whether a step has to be skipped.
/// Complex gradients count by their magnitudes, as in torch. One host read for each device that is not the CPU.
/// @param norm_type  order of the norm, above 0; infinity: the largest magnitude
double grad_norm(const std::vector<at::Tensor>& parameters, double norm_type = 2.0);

/// What gradients of this norm are multiplied by so that it is at most max_norm:
/// min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_. For FusedStep::clip, which
/// clips without a pass of its own:
///
///     const double norm = optim::grad_norm(parameters) / scale;      // of scaled gradients
///     optimizer.step(optim::FusedStep()
///                        .inv_scale(1 / scale)
///                        .clip(optim::clip_factor(norm, 1.0))
///                        .found_inf(torch::full({1}, !std::isfinite(norm))));
double clip_factor(double norm, double max_norm);

/// Multiplies all gradients by a factor, in place: products in fp32 (of fp64 gradients in fp64),
/// rounded once; of sparse ones the values, coalesced. A parameter that is named twice counts once.
void scale_grads_(const std::vector<at::Tensor>& parameters, double factor);

/// Scales all gradients in place so that their norm is at most max_norm, and returns the norm that
/// they had: torch::nn::utils::clip_grad_norm_, in one pass that reads and, only where something
/// has to be clipped, one that writes: scale_grads_.
/// @param error_if_nonfinite  true: Error if the norm is inf or NaN, before anything is changed;
///                            false: as torch, an infinite norm makes gradients 0 or NaN, and a NaN
///                            makes them NaN
double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                       double norm_type = 2.0, bool error_if_nonfinite = false);

}  // namespace semitone::optim
