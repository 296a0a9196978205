#pragma once

#include <string_view>

namespace semitone::kernels {

// Warns, once for each CUDA device and process, that the device has none of Semitone's kernels, and
// why (why_no_cuda_kernels of cuda_kernels.h). The reference implementations, composed of
// LibTorch's operators, compute everything there: correctly, but several times slower, which
// nothing else would reveal.
void warn_of_missing_kernels(int device, std::string_view reason);

}  // namespace semitone::kernels
