#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace semitone::optim {

/// Returns the norm of all gradients together, as if they were one vector, in fp64. For norm_type 2
/// and infinity it takes one vectorised pass over dense fp32, fp16 and bf16 gradients, and sums in
/// a fixed order for any number of threads; other cases use ATen operators. Parameters without a
/// gradient are ignored, and a duplicate parameter is included once. The result is 0 if there is no
/// gradient. The norm is inf or NaN if a gradient is, so it also shows whether a step must be
/// skipped. Complex gradients contribute their magnitudes, as in torch. It waits once for each
/// device other than the CPU, to copy the norms to the host.
/// @param norm_type  order of the norm, above 0; infinity: the largest magnitude
double grad_norm(const std::vector<at::Tensor>& parameters, double norm_type = 2.0);

/// Returns the factor that reduces gradients of this norm to a norm of at most max_norm. As in
/// torch.nn.utils.clip_grad_norm_, it is min(1, max_norm / (norm + 1e-6)). Pass it to
/// FusedStep::clip, which clips without a separate pass:
///
///     const double norm = optim::grad_norm(parameters) / scale;      // of scaled gradients
///     optimizer.step(optim::FusedStep()
///                        .inv_scale(1 / scale)
///                        .clip(optim::clip_factor(norm, 1.0))
///                        .found_inf(torch::full({1}, !std::isfinite(norm))));
double clip_factor(double norm, double max_norm);

/// Multiplies all gradients by a factor, in place. Products are computed in fp32 (fp64 for fp64
/// gradients) and rounded once. Sparse gradients are coalesced, and their values are multiplied.
/// The gradient of a duplicate parameter is multiplied once.
void scale_grads_(const std::vector<at::Tensor>& parameters, double factor);
/// The same with a factor in a device's memory: one floating-point element. Nothing is read back.
/// The factor of fp32 and 16-bit gradients is rounded to fp32. Error for another number of
/// elements.
void scale_grads_(const std::vector<at::Tensor>& parameters, const at::Tensor& factor);

/// Scales all gradients in place so that their norm is at most max_norm, and returns the norm
/// before scaling, as torch::nn::utils::clip_grad_norm_ does. It reads the gradients in one pass,
/// and writes them in a second pass (scale_grads_) only if they have to be clipped.
/// @param error_if_nonfinite  true: Error if the norm is inf or NaN, before anything is changed;
///                            false: as in torch, an infinite norm makes gradients 0 or NaN, and
///                            a NaN norm makes them NaN
double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                       double norm_type = 2.0, bool error_if_nonfinite = false);

/// Returns the norm of all tensors together, as torch.nn.utils.get_total_norm does, without a host
/// read: a scalar in fp64 on the device of the first tensor (of the CPU if there is none). The
/// tensors are dense, as gradients usually are, and may be complex. Undefined ones are ignored. It
/// is computed as in grad_norm.
/// @param norm_type  order of the norm, above 0; infinity: the largest magnitude
at::Tensor get_total_norm(const std::vector<at::Tensor>& tensors, double norm_type = 2.0);

/// Multiplies all gradients by min(1, max_norm / (total_norm + 1e-6)), as
/// torch.nn.utils.clip_grads_with_norm_ does. Together with get_total_norm it clips as
/// clip_grad_norm_ does, without a host read:
///
///     std::vector<at::Tensor> grads;
///     for (const auto& parameter : parameters) grads.push_back(parameter.grad());
///     optim::clip_grads_with_norm_(parameters, 1.0, optim::get_total_norm(grads));
///
/// The pass over the gradients is always made. As in torch, an infinite norm makes gradients 0 or
/// NaN, and a NaN norm makes them NaN.
/// @param total_norm  one floating-point element on any device
void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           const at::Tensor& total_norm);

}  // namespace semitone::optim
