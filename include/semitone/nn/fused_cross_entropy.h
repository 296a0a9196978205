#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/options/loss.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <ostream>

namespace semitone::nn {

/// Options of fused_cross_entropy: those of torch::nn::CrossEntropyLoss, and inplace_backward.
struct FusedCrossEntropyOptions {
  using reduction_t = torch::nn::CrossEntropyLossOptions::reduction_t;

  /// Weight of each class: (C). Undefined: 1.
  TORCH_ARG(at::Tensor, weight);
  /// Rows with this target contribute neither to the loss nor to the gradient.
  TORCH_ARG(std::int64_t, ignore_index) = -100;
  /// torch::kMean (over the rows that are not ignored; NaN if all are), torch::kSum or
  /// torch::kNone.
  TORCH_ARG(reduction_t, reduction) = torch::kMean;
  /// The share of the target distribution that is spread over all classes, in [0, 1].
  TORCH_ARG(double, label_smoothing) = 0;
  /// Whether the backward pass may overwrite the logits with their gradient, which saves memory of
  /// their size. Set it only if nothing reads the logits afterwards. A program that does reads the
  /// gradient instead. In a second backward pass, and in the backward of an operator that saved the
  /// logits as its result (such as exp or softmax), LibTorch raises its error for a tensor that was
  /// modified in place. Leaves of the graph, views of them, and logits whose rows overlap are never
  /// overwritten.
  TORCH_ARG(bool, inplace_backward) = false;
};

/// Softmax cross entropy in one pass over the logits, and its gradient in another. Unlike
/// at::cross_entropy_loss it neither copies 16-bit logits to fp32 nor stores the log-softmax.
///
/// @param logits  (N, C), floating-point
/// @param target  (N), int64 (or uint8): classes in [0, C), or ignore_index
/// @return  fp32 (fp64 for fp64 logits): a scalar, or (N) with torch::kNone. The gradient has the
///          logits' dtype.
///
/// On the CPU, fp32, fp16 and bf16 logits are computed in fp32. Each vector lane accumulates a sum
/// in fp32 for at most 256 terms at a time, and these partial sums are added in fp64. fp64 logits
/// use ATen operators. Results do not depend on the number of threads. Exponentials below 2^-126
/// become 0. Infinities and NaNs propagate as in LibTorch, except that the gradient of an ignored
/// row is always 0. Nothing is saved when gradients are disabled. The gradient can be
/// differentiated again, through LibTorch's operators.
///
/// CUDA devices with Semitone's kernels work in the same way, but the host does not wait for the
/// device to check the targets. The loss of a row with an invalid target is NaN there, whereas
/// LibTorch's kernel makes the device unusable for the process. The function can therefore be
/// captured in a CUDA graph.
///
/// at::cross_entropy_loss computes all other cases: class weights, probabilities as targets, logits
/// with another number of dimensions, other devices. 16-bit logits are then converted to fp32.
///
/// Error for targets that are neither a class nor ignore_index (on a CPU, with row, target and C),
/// for targets of another dtype, shape or device, and for a label_smoothing outside [0, 1]. In the
/// other cases, LibTorch's own errors pass through.
at::Tensor fused_cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                               const FusedCrossEntropyOptions& options = {});

/// torch::nn::CrossEntropyLoss implemented by fused_cross_entropy.
///
///     nn::FusedCrossEntropy loss_fn(nn::FusedCrossEntropyOptions().label_smoothing(0.1));
///     auto loss = loss_fn(logits.flatten(0, 1), tokens.flatten());
class FusedCrossEntropyImpl : public torch::nn::Cloneable<FusedCrossEntropyImpl> {
 public:
  explicit FusedCrossEntropyImpl(FusedCrossEntropyOptions options_ = {});

  at::Tensor forward(const at::Tensor& logits, const at::Tensor& target);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  FusedCrossEntropyOptions options;
  at::Tensor weight;  ///< a buffer: options.weight() on the module's device
};
TORCH_MODULE(FusedCrossEntropy);

}  // namespace semitone::nn
