#pragma once

#include <ATen/core/Tensor.h>

// Tensors in another floating dtype, at the speed of memory: LibTorch 2.11 reaches half of it from
// fp32 to bf16.
namespace semitone::kernels {

// tensor.to(dtype) in new memory, laid out like the tensor if that has no gaps: rounded to nearest,
// ties to even; NaNs stay NaNs. A kernel for fp32, fp16 and bf16 on the CPU without gaps, else the
// definition.
at::Tensor convert(const at::Tensor& tensor, at::ScalarType dtype);

// tensor.to(dtype).to(kFloat) of an fp32 tensor and a 16-bit dtype, in one pass over memory: numbers
// that the dtype holds. A kernel where convert has one, else the definition.
at::Tensor round_to(const at::Tensor& tensor, at::ScalarType dtype);

// Whether there is a kernel, and the tensor so large that memory is what counts.
bool is_worth_converting(const at::Tensor& tensor, at::ScalarType dtype);

namespace ref {
at::Tensor convert(const at::Tensor& tensor, at::ScalarType dtype);
at::Tensor round_to(const at::Tensor& tensor, at::ScalarType dtype);
}  // namespace ref

}  // namespace semitone::kernels
