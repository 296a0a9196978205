#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <set>
#include <utility>

// What src/amp/cuda_step_graph.cpp takes from LibTorch's CUDA headers, without a device: found in
// their place by the test that compiles it. Captures follow LibTorch 2.11's order: memory pools,
// the random generator, the stream; and at the end, the stream first, so that a capture that was
// broken leaves the rest as it is.
namespace semitone::test {

// The state of the device and of LibTorch.
struct CudaGraphsOnCpu {
  bool stream_captures = false;
  bool stream_is_broken = false;    // by what cannot be captured: known when the capture ends
  bool generator_captures = false;  // dropout and randn are errors outside of a capture
  bool refuses_to_begin = false;    // the stream
  std::set<c10::MempoolId_t> device_pools;  // that memory is collected for
  std::set<c10::MempoolId_t> host_pools;
  std::set<c10::MempoolId_t> unreleased_pools;  // of the device
  int graphs = 0;                               // that are alive and hold a capture
  std::uint64_t pools_made = 0;
  int nodes = 0;  // of the capture
  int replays = 0;

  static CudaGraphsOnCpu& state() {
    static CudaGraphsOnCpu value;
    return value;
  }
};

}  // namespace semitone::test

enum cudaError_t { cudaSuccess = 0 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal };
inline cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}
#define C10_CUDA_CHECK(expression) static_cast<void>(expression)

namespace at::cuda {

using c10::MempoolId_t;

inline MempoolId_t graph_pool_handle() {
  return {0, ++semitone::test::CudaGraphsOnCpu::state().pools_made};
}

class CUDAGraph {
 public:
  CUDAGraph() = default;
  CUDAGraph(const CUDAGraph&) = delete;
  CUDAGraph& operator=(const CUDAGraph&) = delete;
  ~CUDAGraph() { reset(); }

  void capture_begin(MempoolId_t pool, cudaStreamCaptureMode /*mode*/) {
    auto& cuda = semitone::test::CudaGraphsOnCpu::state();
    pool_ = pool;
    cuda.device_pools.insert(pool);
    cuda.unreleased_pools.insert(pool);
    at::getHostAllocator(at::kCUDA)->begin_allocate_to_pool(pool, [](c10::Stream) { return true; });
    cuda.generator_captures = true;
    TORCH_CHECK(!cuda.refuses_to_begin && !cuda.stream_captures, "CUDA error: cannot begin");
    cuda.stream_captures = true;
  }

  void capture_end() {
    auto& cuda = semitone::test::CudaGraphsOnCpu::state();
    const bool captured = std::exchange(cuda.stream_captures, false);
    TORCH_CHECK(captured, "CUDA error: the stream is not capturing");
    TORCH_CHECK(!std::exchange(cuda.stream_is_broken, false),
                "CUDA error: operation failed due to a previous error during capture");
    cuda.device_pools.erase(pool_);
    at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(pool_);
    cuda.generator_captures = false;
    if (std::exchange(cuda.nodes, 0) == 0) TORCH_WARN("The CUDA Graph is empty.");
    ended_ = true;
    ++cuda.graphs;
  }

  void replay() {
    TORCH_CHECK(ended_, "replay without a capture");
    ++semitone::test::CudaGraphsOnCpu::state().replays;
  }

  void reset() {
    if (!std::exchange(ended_, false)) return;
    auto& cuda = semitone::test::CudaGraphsOnCpu::state();
    cuda.unreleased_pools.erase(pool_);
    at::getHostAllocator(at::kCUDA)->release_pool(pool_);
    --cuda.graphs;
  }

 private:
  MempoolId_t pool_{0, 0};
  bool ended_ = false;
};

}  // namespace at::cuda
