#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>

#include <ostream>

namespace semitone::nn {

/// Dropout in one pass over memory forward and one backward, without a mask in memory. On the CPU
/// it is several times as fast as at::dropout.
///
/// Each element is set to 0 with probability p, and otherwise multiplied by 1 / (1 - p). A seed
/// selects the dropped elements: each call draws one 64-bit number from LibTorch's default CPU
/// generator, and the counter-based generator Philox4x32-7 expands it. torch::manual_seed therefore
/// makes the mask reproducible, and a saved generator state continues it. The mask does not depend
/// on the number of threads, the dtype or the processor. The backward pass regenerates it, so only
/// the seed is saved.
///
/// @param input  floating-point, of any shape and strides; the strides of a dense input are
///               preserved
/// @param p      in [0, 1]. It is rounded to a multiple of 2^-16 (and to 1 - 2^-16 if it is between
///               that and 1); the factor is exact for the rounded probability.
/// @param train  false: returns the input itself. So do p = 0 and an input without elements. No
///               random number is drawn in these cases.
///
/// The product is computed in fp32 (fp64 for fp64) and rounded once. As in at::dropout, dropped
/// elements are multiplied by 0: infinities and NaNs become NaN, and negative numbers -0. The mask
/// differs from at::dropout's after the same torch::manual_seed. The function can be differentiated
/// any number of times.
///
/// fp32, fp16 and bf16 on the CPU use the fused kernel. fp64 on the CPU uses a slower
/// implementation with the same mask. All other inputs go to at::dropout.
///
/// Error for an undefined input and for p outside [0, 1].
at::Tensor fused_dropout(const at::Tensor& input, double p = 0.5, bool train = true);

/// residual + fused_dropout(input, p, train) in one pass, rounded once: the end of a residual
/// branch.
///
/// The result has the dtype of at::add, so that the fp32 residual of a 16-bit branch stays fp32. It
/// has the input's strides.
///
/// In addition, Error for a residual of another shape.
at::Tensor fused_dropout_add(const at::Tensor& input, const at::Tensor& residual, double p = 0.5,
                             bool train = true);

/// Options of FusedDropout.
struct FusedDropoutOptions {
  FusedDropoutOptions(double p = 0.5)  // NOLINT(google-explicit-constructor): as LibTorch's
      : p_(p) {}

  /// Probability that an element is dropped.
  TORCH_ARG(double, p);
};

/// torch::nn::Dropout implemented by fused_dropout, with an optional residual.
///
///     nn::FusedDropout dropout(0.1);
///     x = dropout(attention(x), x);   // x + dropout(attention(x))
class FusedDropoutImpl : public torch::nn::Cloneable<FusedDropoutImpl> {
 public:
  explicit FusedDropoutImpl(const FusedDropoutOptions& options_ = {});

  /// @param residual  undefined, or of the input's shape: added
  at::Tensor forward(const at::Tensor& input, const at::Tensor& residual = {});

  /// Error if p is outside [0, 1].
  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  FusedDropoutOptions options;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})
};
TORCH_MODULE(FusedDropout);

}  // namespace semitone::nn
