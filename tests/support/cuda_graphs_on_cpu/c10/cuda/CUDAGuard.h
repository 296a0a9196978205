#pragma once

#include <c10/core/Device.h>

namespace c10::cuda {

class CUDAStream {};

inline CUDAStream getStreamFromPool(bool /*high_priority*/, c10::DeviceIndex /*device*/) {
  return {};
}
inline CUDAStream getCurrentCUDAStream(c10::DeviceIndex /*device*/) {
  return {};
}

class CUDAGuard {
 public:
  explicit CUDAGuard(c10::DeviceIndex /*device*/) {}
};
class CUDAStreamGuard {
 public:
  explicit CUDAStreamGuard(const CUDAStream& /*stream*/) {}
};

}  // namespace c10::cuda
