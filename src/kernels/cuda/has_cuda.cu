#include "src/kernels/cuda/cuda_kernels.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace semitone::kernels {
namespace {

// Of each device: whether its compute capability is one that this file is compiled for, or a later one.
std::vector<bool> usable_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return {};
  std::vector<bool> usable;
  for (int device = 0; device < count; ++device) {
    int major = 0;
    int minor = 0;
    const bool known =
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
    usable.push_back(known && 100 * major + 10 * minor >= std::min({__CUDA_ARCH_LIST__}));
  }
  return usable;
}

}  // namespace

bool has_cuda_kernels(int device) {
  static const std::vector<bool> usable = usable_devices();
  return device >= 0 && static_cast<std::size_t>(device) < usable.size() &&
         usable[static_cast<std::size_t>(device)];
}

}  // namespace semitone::kernels
