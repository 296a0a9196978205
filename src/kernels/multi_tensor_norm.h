#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

namespace semitone::kernels {

// The p-norm of each tensor in fp64, on the host: (sum |x|^p)^(1/p), and for p = infinity max |x|.
// 0 for an empty tensor; NaN if an element is NaN. p > 0.
//
// Dense floating tensors on any devices, with one host read for each device other than the CPU.
// fp32 and 16-bit tensors without gaps, on the CPU or with CUDA kernels, need one pass for p = 2
// and infinity. Squares are exact in fp64, and partial sums of fixed chunks are added in order, so
// that the result does not depend on the number of threads.
std::vector<double> multi_tensor_norms(std::span<const at::Tensor> tensors, double p);

// The same for tensors on one device, at least one: (tensors) numbers there, in fp64. Nothing is
// read back.
at::Tensor multi_tensor_norms_on_device(std::span<const at::Tensor> tensors, double p);

// The norm of all elements together, from the norms of the tensors.
double total_norm(std::span<const double> norms, double p);
// From a list of fp64 norms on a device: a scalar there.
at::Tensor total_norm_on_device(const at::Tensor& norms, double p);

namespace ref {
// The reference implementation: a scalar in fp64 on the tensor's device.
at::Tensor norm(const at::Tensor& tensor, double p);
}  // namespace ref

}  // namespace semitone::kernels
