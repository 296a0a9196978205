#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>

#include <ostream>

namespace semitone::nn {

/// Dropout in one pass over memory each way, without a mask in memory: at::dropout, several times
/// as fast on the CPU.
///
/// Each element is set to 0 with probability p, and multiplied with 1 / (1 - p) otherwise. Which
/// are dropped follows from a seed, one 64-bit number of LibTorch's default CPU generator for each
/// call, by the counter-based generator Philox4x32-7: torch::manual_seed makes it repeat, and a
/// saved generator state continues it. It does not depend on the number of threads, the dtype or
/// the processor. The backward pass computes it again: nothing but the seed is saved.
///
/// @param input  floating-point, of any shape and layout; a dense one's layout is kept
/// @param p      in [0, 1]. It is rounded to a multiple of 2^-16 (and to 1 - 2^-16 if it is between
///               that and 1); the factor is exact for the rounded one.
/// @param train  false: the input itself is returned; as with p = 0 or without elements, and then no
///               number is drawn
///
/// Computed in fp32 (fp64 for fp64) and rounded once. As in at::dropout the dropped are multiplied
/// with 0: infinities and NaNs become NaN, and negative numbers -0. The mask is another than that
/// of at::dropout after the same torch::manual_seed. It can be differentiated any number of times.
///
/// fp32, fp16 and bf16 on the CPU take the fast way; fp64 there a slow one with the same mask;
/// everything else is at::dropout.
///
/// Error for an undefined input and p outside [0, 1].
at::Tensor fused_dropout(const at::Tensor& input, double p = 0.5, bool train = true);

/// residual + fused_dropout(input, p, train) in the same one pass, rounded once: the end of a
/// residual branch.
///
/// The result has the dtype that at::add would give, so the fp32 residual of a 16-bit branch stays
/// fp32; and the input's layout.
///
/// Error also for a residual of another shape.
at::Tensor fused_dropout_add(const at::Tensor& input, const at::Tensor& residual, double p = 0.5,
                             bool train = true);

/// Options of FusedDropout.
struct FusedDropoutOptions {
  FusedDropoutOptions(double p = 0.5)  // NOLINT(google-explicit-constructor): as LibTorch's
      : p_(p) {}

  /// Probability that an element is dropped.
  TORCH_ARG(double, p);
};

/// torch::nn::Dropout by fused_dropout, with an optional residual.
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
