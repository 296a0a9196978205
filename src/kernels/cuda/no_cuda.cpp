// Replaces the CUDA kernels in a build without them (cmake/cuda.cmake): each declaration in the headers of cuda_kernels.h
// becomes a function that throws. None is called, since why_no_cuda_kernels returns a reason for
// every device.

#include "semitone/core/error.h"

namespace semitone::kernels {
namespace {

[[noreturn]] void fail() {
  throw Error("kernels.cuda", "a library built with its CUDA kernels", "one built without");
}

}  // namespace
}  // namespace semitone::kernels

#pragma GCC diagnostic ignored "-Wunused-parameter"
// static_assert takes the semicolon that follows the macro.
#define SEMITONE_CUDA_KERNEL(...) \
  __VA_ARGS__;                    \
  __VA_ARGS__ {                   \
    fail();                       \
  }                               \
  static_assert(true)

#include "src/kernels/cuda/cuda_kernels.h"

namespace semitone::kernels {

std::string_view why_no_cuda_kernels(int) {
  return "the library was built without them (build it where nvcc 12.1 and LibTorch 2.11 or newer "
         "are found)";
}

}  // namespace semitone::kernels
