#include "src/kernels/on_cuda.h"

#include "semitone/core/error.h"
#include "src/core/libtorch_release.h"
#include "src/kernels/missing_kernels.h"

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace semitone::kernels {
namespace {

// LibTorch before 2.11 does not tell it. A library built with such a release has no CUDA kernels
// (cmake/cuda.cmake), so that nothing asks for it.
CudaStream current_stream([[maybe_unused]] c10::Device device) {
#if SEMITONE_LIBTORCH_SINCE(2, 11)
  return {c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle()};
#else
  throw Error("kernels.cuda", "LibTorch 2.11 or newer", TORCH_VERSION);
#endif
}

}  // namespace

bool runs_on_cuda(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return false;
  const std::string_view reason = why_no_cuda_kernels(tensor.get_device());
  if (!reason.empty()) warn_of_missing_kernels(tensor.get_device(), reason);
  return reason.empty();
}

CurrentCuda::CurrentCuda(const at::Tensor& tensor)
    : guard_(tensor.device()), stream_(current_stream(tensor.device())) {}

}  // namespace semitone::kernels
