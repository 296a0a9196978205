#pragma once

#include "src/kernels/cross_entropy.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

// Softmax cross entropy of rows whose logits are in memory a chunk of classes at a time.
namespace semitone::nn {

struct ChunkedTargets {
  at::Tensor classes;  // (N), int64
  std::int64_t ignore_index;
  double label_smoothing;
  std::int64_t number_of_classes;
};

// Adds up the chunks in fp64. A row whose target is in no chunk and is not ignored gives NaN.
class ChunkedSoftmax {
 public:
  explicit ChunkedSoftmax(ChunkedTargets targets);

  // @param logits  (N, n), the classes [first, first + n)
  void add(const at::Tensor& logits, std::int64_t first);

  // Of all rows, in fp32, or fp64 if the logits are.
  kernels::RowLosses losses() const;

 private:
  ChunkedTargets targets_;
  c10::ScalarType dtype_ = c10::ScalarType::Float;
  at::Tensor max_;  // of all logits so far
  at::Tensor sum_;  // of exp(logit - max_)
  at::Tensor target_logit_;
  at::Tensor sum_of_logits_;  // undefined without smoothing
};

// The gradient of a chunk's logits, in their memory if a kernel can do that.
//
// @param losses  those of all chunks
// @param grad    of the losses, (N), in their dtype
at::Tensor gradient_of_chunk(const at::Tensor& logits, std::int64_t first,
                             const ChunkedTargets& targets, const kernels::RowLosses& losses,
                             const at::Tensor& grad);

}  // namespace semitone::nn
