#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/options/loss.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <ostream>

namespace semitone::nn {

/// Options of fused_cross_entropy: those of torch::nn::CrossEntropyLoss, and one more.
struct FusedCrossEntropyOptions {
  using reduction_t = torch::nn::CrossEntropyLossOptions::reduction_t;

  /// Of each class: (C). Undefined: 1.
  TORCH_ARG(at::Tensor, weight);
  /// Rows with this target have no part in loss and gradient.
  TORCH_ARG(std::int64_t, ignore_index) = -100;
  /// torch::kMean (over the rows that are not ignored; NaN if all are), torch::kSum or torch::kNone.
  TORCH_ARG(reduction_t, reduction) = torch::kMean;
  /// In [0, 1]: this share of a target goes to all classes alike.
  TORCH_ARG(double, label_smoothing) = 0;
  /// Whether the backward pass may write the gradient of the logits over the logits, which saves
  /// memory of their size. For logits that nobody looks at after the loss: not the function that
  /// made them, nor a second backward pass (LibTorch then raises an error that they were modified).
  /// Leaves of the graph and logits whose rows overlap are never overwritten.
  TORCH_ARG(bool, inplace_backward) = false;
};

/// Softmax cross entropy in one pass over the logits, and its gradient in another:
/// at::cross_entropy_loss without copies of 16-bit logits in fp32, and without the log-softmax in
/// memory.
///
/// @param logits  (N, C), floating-point
/// @param target  (N), int64 (or uint8): classes in [0, C), or ignore_index
/// @return  in fp32 (fp64 for fp64 logits): a number, or (N) with torch::kNone. Gradients of the
///          logits have their dtype.
///
/// fp32, fp16 and bf16 logits on the CPU are computed in fp32, with sums of at most 256 terms a lane
/// in fp32 that go on in fp64; fp64 ones by ATen operators. Results do not depend on the number of
/// threads. Exponentials below 2^-126 count as 0. Infinities and NaNs go on as in LibTorch, but the
/// gradient of rows that are ignored is 0 whatever is in them. With gradients switched off nothing
/// is saved. The gradient can be differentiated again, by LibTorch's operators.
///
/// On CUDA devices with kernels of ours likewise, but the host does not wait for the device to look at
/// targets: the loss of a row whose target is no class is NaN (LibTorch's kernel ends the process's
/// use of the device). So it can be captured in a CUDA graph.
///
/// Class weights, probabilities as targets, logits of another number of dimensions and other devices
/// are computed by at::cross_entropy_loss, 16-bit logits in fp32.
///
/// Error for targets that are no class and not ignore_index (with row, target and C; on a CPU),
/// targets of another dtype, shape or device, and a label_smoothing outside [0, 1].
at::Tensor fused_cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                               const FusedCrossEntropyOptions& options = {});

/// torch::nn::CrossEntropyLoss by fused_cross_entropy.
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
