#pragma once

#include "src/kernels/cuda/cuda_kernels.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

// How a tensor-level function decides whether the CUDA kernels support a tensor, and on which
// stream. Nothing of CUDA is needed to compile or link it.
namespace semitone::kernels {

// Whether the functions of cuda_kernels.h support the tensor's memory. For a tensor on a CUDA
// device without these functions, a warning says so, once.
bool runs_on_cuda(const at::Tensor& tensor);

// Whether there are kernels for the tensor's device, the CPU or CUDA.
inline bool has_kernels(const at::Tensor& tensor) {
  return tensor.is_cpu() || runs_on_cuda(tensor);
}

// Whether a kernel may read the tensor together with the other one: it is undefined, or on the same
// device.
inline bool same_device(const at::Tensor& tensor, const at::Tensor& other) {
  return !tensor.defined() || tensor.device() == other.device();
}

// While this object exists, the tensor's device is the current one, and `stream` is LibTorch's
// current stream there. Memory that is freed during that time is reused by later work on that
// stream only.
class CurrentCuda {
 public:
  explicit CurrentCuda(const at::Tensor& tensor);
  CudaStream stream() const { return stream_; }

 private:
  c10::DeviceGuard guard_;
  CudaStream stream_;
};

}  // namespace semitone::kernels
