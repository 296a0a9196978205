#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

// Softmax cross entropy of rows in one pass over the logits, and its gradient in another.
//
// Logits are (N, C), floating-point, in any layout and on any device. Targets are (N), int64, on
// the same device, each a class in [0, C) or ignore_index. Everything is computed in fp32 (fp64 for
// fp64 logits). fp32, fp16 and bf16 on the CPU and with CUDA kernels need one pass. There each
// vector lane accumulates a sum in fp32 for at most 256 terms at a time, and these partial sums are
// added in fp64. Results do not depend on the number of threads.
namespace semitone::kernels {

struct ClassTargets {
  at::Tensor classes;
  std::int64_t ignore_index;
  double label_smoothing;  // in [0, 1]
};

// (N) each, in fp32 or fp64; unspecified in ignored rows. The gradient needs max and inv_sum:
// softmax = exp(logits - max) * inv_sum. The two are more exact than max + log(sum) in fp32, whose
// error grows with the logits.
struct RowLosses {
  at::Tensor loss;  // 0 in rows that are ignored
  at::Tensor max;
  at::Tensor inv_sum;
};

RowLosses cross_entropy(const at::Tensor& logits, const ClassTargets& targets);

// The gradient of the logits, in their dtype: 0 in ignored rows.
//
// @param grad      of the losses: (N), or one number for all rows; in the dtype of `losses`
// @param in_place  whether the result may use the logits' memory. It does if their rows do not
//                  overlap, and their version counter increases.
at::Tensor cross_entropy_gradient(const at::Tensor& logits, const ClassTargets& targets,
                                  const RowLosses& losses, const at::Tensor& grad, bool in_place);

namespace ref {
// The reference implementations, composed of ATen operators.
RowLosses cross_entropy(const at::Tensor& logits, const ClassTargets& targets);
at::Tensor cross_entropy_gradient(const at::Tensor& logits, const ClassTargets& targets,
                                  const RowLosses& losses, const at::Tensor& grad);
}  // namespace ref

}  // namespace semitone::kernels
