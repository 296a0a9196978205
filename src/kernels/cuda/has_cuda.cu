#include "src/kernels/cuda/cuda_kernels.h"
#include "src/kernels/cuda/images.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

namespace semitone::kernels {
namespace {

// 8.0 as 800, the format of __CUDA_ARCH_LIST__.
std::string capability(int number) {
  return std::to_string(number / 100) + "." + std::to_string(number / 10 % 10);
}

constexpr int kImages[] = {__CUDA_ARCH_LIST__};
constexpr int kPtx = SEMITONE_CUDA_PTX < 0 ? std::max({__CUDA_ARCH_LIST__}) : SEMITONE_CUDA_PTX;

// Nothing if kernels that are compiled as this file is run on the device.
std::string why_not(int device) {
  int major = 0;
  int minor = 0;
  for (const auto& [value, attribute] : {std::pair(&major, cudaDevAttrComputeCapabilityMajor),
                                         std::pair(&minor, cudaDevAttrComputeCapabilityMinor)}) {
    const cudaError_t error = cudaDeviceGetAttribute(value, attribute, device);
    if (error != cudaSuccess) return cudaGetErrorString(error);
  }
  const int has = 100 * major + 10 * minor;
  if (runs_on(has, kImages, kPtx)) return "";
  std::string compiled;
  for (const int image : kImages) compiled += (compiled.empty() ? "" : ", ") + capability(image);
  return "they were compiled for compute capability " + compiled +
         (kPtx > 0 ? " and later" : " without PTX") + ", it has " + capability(has) +
         " (configure with -DSEMITONE_CUDA_ARCHITECTURES=" + std::to_string(has / 10) +
         ", if nvcc knows it)";
}

// For each device.
struct Reasons {
  Reasons() {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) {
      without_devices = "the CUDA runtime " + std::to_string(CUDART_VERSION / 1000) + "." +
                        std::to_string(CUDART_VERSION / 10 % 100) +
                        " that they are built with says \"" + cudaGetErrorString(error) +
                        "\" (update the driver, or build with an older nvcc)";
    }
    for (int device = 0; device < count; ++device) by_device.push_back(why_not(device));
  }

  std::vector<std::string> by_device;
  std::string without_devices = "the CUDA runtime that they are built with does not see it";
};

}  // namespace

std::string_view why_no_cuda_kernels(int device) {
  static const Reasons reasons;
  const auto place = static_cast<std::size_t>(device);
  return device >= 0 && place < reasons.by_device.size() ? reasons.by_device[place]
                                                         : reasons.without_devices;
}

}  // namespace semitone::kernels
