#pragma once

#include "ATen/cuda/CUDAGraph.h"

namespace c10::cuda::CUDACachingAllocator {

inline void emptyCache() {}

inline void endAllocateToPool(c10::DeviceIndex /*device*/, c10::MempoolId_t pool) {
  TORCH_CHECK(semitone::test::CudaGraphsOnCpu::state().device_pools.erase(pool) == 1,
              "endAllocatePool: not currently recording to mempool_id");
}

inline void releasePool(c10::DeviceIndex /*device*/, c10::MempoolId_t pool) {
  TORCH_CHECK(semitone::test::CudaGraphsOnCpu::state().unreleased_pools.erase(pool) == 1,
              "releasePool: released before");
}

}  // namespace c10::cuda::CUDACachingAllocator
