#include "src/kernels/on_cuda.h"

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace semitone::kernels {

bool runs_on_cuda(const at::Tensor& tensor) {
  return tensor.is_cuda() && has_cuda_kernels(tensor.get_device());
}

CurrentCuda::CurrentCuda(const at::Tensor& tensor)
    : guard_(tensor.device()),
      stream_{c10::impl::VirtualGuardImpl(tensor.device().type())
                  .getStream(tensor.device())
                  .native_handle()} {}

}  // namespace semitone::kernels
