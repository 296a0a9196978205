#pragma once

#include <ATen/core/Tensor.h>

// Conversion to another floating dtype, at the speed of memory. LibTorch 2.11 reaches half of that
// from fp32 to bf16.
namespace semitone::kernels {

// tensor.to(dtype) in new memory, with the tensor's strides if that has no gaps: rounded to
// nearest, ties to even; NaNs stay NaNs. Uses a kernel for fp32, fp16 and bf16 on the CPU without
// gaps, otherwise the reference.
at::Tensor convert(const at::Tensor& tensor, at::ScalarType dtype);

// tensor.to(dtype).to(kFloat) of an fp32 tensor and a 16-bit dtype, in one pass over memory: the
// numbers that the dtype can represent. Uses a kernel where convert has one, otherwise the
// reference.
at::Tensor round_to(const at::Tensor& tensor, at::ScalarType dtype);

// Whether there is a kernel, and the tensor is so large that memory bandwidth dominates.
bool is_worth_converting(const at::Tensor& tensor, at::ScalarType dtype);

namespace ref {
at::Tensor convert(const at::Tensor& tensor, at::ScalarType dtype);
at::Tensor round_to(const at::Tensor& tensor, at::ScalarType dtype);
}  // namespace ref

}  // namespace semitone::kernels
