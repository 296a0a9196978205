#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/options/loss.h>

#include <cstdint>
#include <optional>

namespace semitone::nn {

/// Options of linear_cross_entropy.
struct LinearCrossEntropyOptions {
  using reduction_t = torch::nn::CrossEntropyLossOptions::reduction_t;

  /// Bias of the linear layer: (C). Undefined: none.
  TORCH_ARG(at::Tensor, linear_bias);
  /// Rows with this target contribute neither to the loss nor to the gradients.
  TORCH_ARG(std::int64_t, ignore_index) = -100;
  /// torch::kMean (over the rows that are not ignored; NaN if all are), torch::kSum or
  /// torch::kNone.
  TORCH_ARG(reduction_t, reduction) = torch::kMean;
  /// The share of the target distribution that is spread over all classes, in [0, 1].
  TORCH_ARG(double, label_smoothing) = 0;
  /// Number of classes whose logits are in memory at the same time. By default as many as give
  /// 2^23 logits (16 MB in 16 bits), but at least 256.
  TORCH_ARG(std::optional<std::int64_t>, chunk_size);
};

/// A linear layer and softmax cross entropy of its result, which is never in memory as a whole:
///
///     auto loss = nn::linear_cross_entropy(hidden, head->weight, tokens);
///
/// computes what this does, with the logits of `chunk_size` classes at a time:
///
///     auto logits = at::linear(hidden, head->weight);
///     auto loss = nn::fused_cross_entropy(logits.flatten(0, -2), tokens.flatten());
///
/// For each row the forward pass keeps the largest logit and the sum of the exponentials. The
/// backward pass computes the logits again, turns them into their gradient, and uses it for the
/// gradients of the chunk at once. So there are four products of matrices where there were three.
/// The method is that of Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models"
/// (2024), without its omission of small gradients. The name is torch.nn.functional's, which works
/// in chunks of rows instead; here, each row of the weight's gradient is the result of one product.
///
/// @param input          (…, H), floating-point
/// @param linear_weight  (C, H)
/// @param target         (…), with the dimensions of `input` but the last; int64 (or uint8): classes
///                       in [0, C), or ignore_index
/// @return  fp32 (fp64 for fp64 logits): a scalar, or the target's shape with torch::kNone
///
/// - In regions of autocast, Semitone's or LibTorch's, the product is that of at::linear, and
///   `linear_weight` is cast chunk by chunk. Both passes are in the regions of the forward pass.
///   Products in fp8 are not supported: the product has the region's 16-bit dtype then.
/// - Logits are rounded as those of at::linear, and so are their gradients. If there are several
///   chunks, the input's gradient is the sum of their 16-bit results, in fp32, rounded once more.
/// - The losses have the precision of nn::fused_cross_entropy's. They are the same for every number
///   of threads, and NaN on a CUDA device for an invalid target.
/// - Gradients can be differentiated again, with all logits in memory.
///
/// Error for shapes that do not match, for targets that are neither a class nor ignore_index (on a
/// CPU), of another dtype or device, and for options out of their range.
at::Tensor linear_cross_entropy(const at::Tensor& input, const at::Tensor& linear_weight,
                                const at::Tensor& target,
                                const LinearCrossEntropyOptions& options = {});

}  // namespace semitone::nn
