#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace semitone::amp {

/// Options of MixedPrecision::scale_loss:
///
///     mixed.scale_loss(loss, optimizer, amp::ScaleLossOptions().loss_id(1)).backward();
struct ScaleLossOptions {
  /// Index of the loss scaler, below Options::num_losses.
  TORCH_ARG(std::int64_t, loss_id) = 0;
  /// Whether the gradients stay scaled after this backward pass. The last pass before the step must
  /// have false here: it unscales the gradients of all passes. These passes must have the same loss
  /// scale. Each delayed pass saves one pass over the gradients. Gradient accumulation is correct
  /// without it, too. Default false.
  TORCH_ARG(bool, delay_unscale) = false;
};

/// A scaled loss on which backward has not finished, as returned by MixedPrecision::scale_loss.
///
/// Usually backward() is all that is needed. To compute with the scaled loss, keep the object, take
/// value(), call torch's backward on the result, and then call finish(). The destructor calls
/// finish() if it was not called. If an exception destroys the object, the gradients get their
/// earlier values back, and gradients of earlier passes with delay_unscale are dropped. The same
/// happens, with a warning, if nothing was back-propagated. None of this, and no check for overflow,
/// happens in plain training: with a constant loss scale of 1 and without master weights, backward()
/// is torch's.
///
/// All parameters of the models get unscaled gradients, at every level, as from torch's backward. A
/// GAN therefore zeroes the discriminator's gradients after the generator's loss. If a gradient of
/// the loss overflows, each optimizer named in scale_loss skips its next step, and the skipped step
/// updates the loss scale. Another optimizer skips its next step only if it still has these
/// gradients then, that is, if they were not zeroed. The same holds for parameters without a
/// gradient in models of other MixedPrecision objects, which this thread was the last to use, and
/// which have no parameter in common with this one, nor scaled gradients of their own.
///
/// After backward, `parameter.grad()` of the model is the gradient that the step will read. It is
/// fp32 for a parameter with a master weight, whatever the parameter's dtype. (It is 16-bit for a
/// semitone::optim optimizer with a scale of 1, on the CPU and on devices with Semitone's kernels.)
/// Clipping, averaging over ranks and any other change, in place or by another tensor, therefore
/// takes effect in the step. (Where gradients are 16-bit, make changes before
/// MixedPrecision::clip_grad_norm_, whose factor the step applies. The next forward() of the model
/// makes them fp32.)
///
/// Finish one loss before the next: between value() and finish(), value() of another ScaledLoss of
/// the same MixedPrecision is an Error (except in plain training: LossScaleOptions::dynamic). A
/// ScaledLoss must not outlive its MixedPrecision.
class [[nodiscard]] ScaledLoss {
 public:
  ScaledLoss(ScaledLoss&& other) noexcept;
  ScaledLoss& operator=(ScaledLoss&&) = delete;
  ~ScaledLoss();

  /// loss * scale, in fp32 (fp64 for an fp64 loss). Not callable on a temporary: the ScaledLoss
  /// would be destroyed before your backward is done, and the gradients would stay scaled.
  ///
  ///     auto scaled = mixed.scale_loss(loss, optimizer);
  ///     scaled.value().backward();
  ///     scaled.finish();
  ///
  /// finish() divides all gradients by the scale, so other terms are added to the loss before
  /// scale_loss, not to this value.
  const at::Tensor& value() &;
  const at::Tensor& value() && = delete;  // keep the ScaledLoss, or call its backward()

  /// Back-propagates and finishes. If backward throws, the gradients are restored (except in plain
  /// training) and the exception propagates. Error at a second call, and for a loss of weights that
  /// a plain optimizer.step() has changed since in their fp32 masters only.
  /// @param gradient      for a loss that is not a scalar, as in torch::Tensor::backward
  /// @param create_graph  the gradients can be differentiated. Error where a parameter that gets one
  ///                      has a master weight
  void backward(const at::Tensor& gradient = {}, bool retain_graph = false,
                bool create_graph = false);

  /// Unscales the gradients (into the gradients of master weights, if there are any), adds earlier
  /// gradients, and checks for inf and NaN. Call it once.
  void finish();

 private:
  friend class MixedPrecision;
  struct Work;
  explicit ScaledLoss(at::Tensor scaled, std::unique_ptr<Work> work,
                      std::vector<torch::optim::Optimizer*> plain = {});
  void require_unfinished() const;
  void cancel() noexcept;

  at::Tensor scaled_;
  std::unique_ptr<Work> work_;                   // null if there is nothing, or nothing more, to do
  std::vector<torch::optim::Optimizer*> plain_;  // without work_, for events::GradientsUnscaled
  bool finished_ = false;
};

}  // namespace semitone::amp
