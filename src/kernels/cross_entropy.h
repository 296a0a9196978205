#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

// Softmax cross entropy of rows in one pass over the logits, and its gradient in another.
//
// Logits are (N, C), floating-point, in any layout and on any device; targets (N), int64, on the same
// device, each a class in [0, C) or ignore_index. Everything is computed in fp32, in fp64 if the
// logits are fp64. In one pass: fp32, fp16 and bf16 on the CPU and with CUDA kernels. There a sum has
// at most 256 terms a lane in fp32 before it goes on in fp64. Results do not depend on the number of
// threads.
namespace semitone::kernels {

struct ClassTargets {
  at::Tensor classes;
  std::int64_t ignore_index;
  double label_smoothing;  // in [0, 1]
};

// (N) each, in fp32 or fp64; any value in rows that are ignored. max and inv_sum are what the
// gradient needs: softmax = exp(logits - max) * inv_sum. Together they are more exact than
// max + log(sum) in fp32, whose error grows with the logits.
struct RowLosses {
  at::Tensor loss;  // 0 in rows that are ignored
  at::Tensor max;
  at::Tensor inv_sum;
};

RowLosses cross_entropy(const at::Tensor& logits, const ClassTargets& targets);

// The gradient of the logits, in their dtype: 0 in rows that are ignored.
//
// @param grad      of the losses: (N), or one number for all rows; in the dtype of `losses`
// @param in_place  whether the result may take the logits' memory. It does where their rows do not
//                  overlap; their version counter then goes up.
at::Tensor cross_entropy_gradient(const at::Tensor& logits, const ClassTargets& targets,
                                  const RowLosses& losses, const at::Tensor& grad, bool in_place);

namespace ref {
// The definitions, composed of ATen operators.
RowLosses cross_entropy(const at::Tensor& logits, const ClassTargets& targets);
at::Tensor cross_entropy_gradient(const at::Tensor& logits, const ClassTargets& targets,
                                  const RowLosses& losses, const at::Tensor& grad);
}  // namespace ref

}  // namespace semitone::kernels
