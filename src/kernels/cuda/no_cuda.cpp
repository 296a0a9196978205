// Replaces the CUDA kernels if there is no nvcc: each declaration in the headers of cuda_kernels.h
// becomes a function that throws. None is called, since why_no_cuda_kernels returns a reason for
// every device.

#include "semitone/core/error.h"

namespace semitone::kernels {
namespace {

[[noreturn]] void fail() {
  throw Error("kernels.cuda", "a library built with the CUDA toolkit", "one built without");
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
  return "the library was built without nvcc (build it where nvcc 12.1 or newer is found)";
}

}  // namespace semitone::kernels
