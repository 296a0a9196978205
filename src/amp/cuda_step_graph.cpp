#include "src/amp/step_graph.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>

#include <exception>
#include <memory>
#include <optional>

namespace semitone::amp {
namespace {

void wait_for(const c10::cuda::CUDAStream& stream, const c10::cuda::CUDAStream& waiting) {
  at::cuda::CUDAEvent reached;
  reached.record(stream);
  reached.block(waiting);
}

// Drops LibTorch's warnings meanwhile.
class WithoutWarnings {
 private:
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning& /*warning*/) override {}
  };
  Silent silent_;
  c10::WarningUtils::WarningHandlerGuard guard_{&silent_};
};

// Everything runs on a separate stream. The default stream cannot be captured, and the per-stream
// state of autograd and the libraries should exist before the capture.
class CudaStepGraph : public StepGraph {
 public:
  explicit CudaStepGraph(c10::Device device)
      : device_(device),
        // LibTorch hands its streams out in turn. Copies of other threads take streams of the
        // default priority, and would become a part of the graph on the same one.
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index())) {}

  void warm_up(const std::function<void()>& work) override {
    const c10::cuda::CUDAGuard on_device(device_.index());
    const auto current = c10::cuda::getCurrentCUDAStream(device_.index());
    wait_for(current, stream_);
    std::exception_ptr failure;
    {
      const c10::cuda::CUDAStreamGuard on_stream(stream_);
      try {
        work();
      } catch (...) {
        failure = std::current_exception();
      }
    }
    wait_for(stream_, current);
    if (failure != nullptr) std::rethrow_exception(failure);
  }

  void capture(const std::function<void()>& work) override {
    const c10::cuda::CUDAGuard on_device(device_.index());
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    // A graph has its own memory, and cannot use what the warm-up left in the allocator's cache.
    c10::cuda::CUDACachingAllocator::emptyCache();
    graph_.emplace();
    const auto pool = at::cuda::graph_pool_handle();
    const c10::cuda::CUDAStreamGuard on_stream(stream_);
    std::exception_ptr failure;
    try {
      // Threads that load data may allocate meanwhile.
      graph_->capture_begin(pool, cudaStreamCaptureModeThreadLocal);
      work();
    } catch (...) {
      failure = std::current_exception();
    }
    try {
      graph_->capture_end();
    } catch (...) {
      if (failure == nullptr) failure = std::current_exception();
      close_pools(pool);
      graph_.reset();
      end_capture_of_generators();
    }
    if (failure == nullptr) return;
    graph_.reset();
    std::rethrow_exception(failure);
  }

  void reset() override { graph_.reset(); }

  void replay() override {
    const c10::cuda::CUDAGuard on_device(device_.index());
    graph_->replay();
  }

 private:
  // If a capture fails in the middle, the allocators of device and pinned memory still collect for
  // it, through a function that belongs to the graph. They are told to stop while the graph exists.
  // For a collection that has not begun, or has ended, they throw.
  void close_pools(at::cuda::MempoolId_t pool) const {
    try {
      c10::cuda::CUDACachingAllocator::endAllocateToPool(device_.index(), pool);
      c10::cuda::CUDACachingAllocator::releasePool(device_.index(), pool);
    } catch (const std::exception&) {  // it does not collect
    }
    try {
      at::HostAllocator* const host = at::getHostAllocator(at::kCUDA);
      host->end_allocate_to_pool(pool);
      host->release_pool(pool);
    } catch (const std::exception&) {  // it does not collect
    }
  }

  // LibTorch 2.11 ends the capture of its random generators only after a successful capture of the
  // stream. After a failed one each dropout or randn on the device would raise "Offset increment
  // outside graph capture encountered unexpectedly". An empty capture ends it.
  void end_capture_of_generators() const {
    const WithoutWarnings quiet;  // of a graph without nodes
    const auto pool = at::cuda::graph_pool_handle();
    at::cuda::CUDAGraph nothing;
    try {
      nothing.capture_begin(pool, cudaStreamCaptureModeThreadLocal);
      nothing.capture_end();
    } catch (const std::exception&) {  // the device itself has failed: the first error says more
      close_pools(pool);
    }
  }

  c10::Device device_;
  c10::cuda::CUDAStream stream_;
  std::optional<at::cuda::CUDAGraph> graph_;
};

}  // namespace

std::unique_ptr<StepGraph> make_step_graph(c10::Device device) {
  if (!device.is_cuda()) return nullptr;
  return std::make_unique<CudaStepGraph>(device);
}

}  // namespace semitone::amp
