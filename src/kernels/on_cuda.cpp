#include "src/kernels/on_cuda.h"

#include "src/kernels/missing_kernels.h"

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace semitone::kernels {

bool runs_on_cuda(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return false;
  const std::string_view reason = why_no_cuda_kernels(tensor.get_device());
  if (!reason.empty()) warn_of_missing_kernels(tensor.get_device(), reason);
  return reason.empty();
}

CurrentCuda::CurrentCuda(const at::Tensor& tensor)
    : guard_(tensor.device()),
      stream_{c10::impl::VirtualGuardImpl(tensor.device().type())
                  .getStream(tensor.device())
                  .native_handle()} {}

}  // namespace semitone::kernels
