#pragma once

#include <string_view>

namespace semitone::kernels {

// Says, once for each CUDA device and process, that the device has none of our kernels, and why
// (why_no_cuda_kernels of cuda_kernels.h). Everything is computed there by the definitions, which are
// composed of LibTorch's operators: right, and several times slower without another sign of it.
void warn_of_missing_kernels(int device, std::string_view reason);

}  // namespace semitone::kernels
