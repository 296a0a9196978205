#include "src/kernels/pinned.h"

#include <ATen/Context.h>
#include <torch/types.h>

namespace semitone::kernels {

bool has_pinned_memory(c10::Device device) {
  if (!device.is_privateuseone()) return device.is_cuda();
  try {  // LibTorch's default hooks throw
    return at::globalContext()
               .getAcceleratorHooksInterface(device.type())
               .getPinnedMemoryAllocator() != nullptr;
  } catch (const c10::Error&) {
    return false;
  }
}

at::Tensor empty_for_copy(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  return at::empty(sizes,
                   at::TensorOptions().dtype(dtype).pinned_memory(has_pinned_memory(device)));
}

}  // namespace semitone::kernels
