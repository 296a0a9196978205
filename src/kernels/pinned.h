#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace semitone::kernels {

// Whether LibTorch has pinned memory of the host for this device, so that copies need not block.
bool has_pinned_memory(c10::Device device);

// Memory of the host for a copy from or to a device: pinned if there is such memory.
at::Tensor empty_for_copy(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device);

}  // namespace semitone::kernels
