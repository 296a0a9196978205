#include "src/amp/step_graph.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

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

// Everything runs on a stream of its own: the default one cannot be captured, and what autograd and
// the libraries keep for a stream should be there before.
class CudaStepGraph : public StepGraph {
 public:
  explicit CudaStepGraph(c10::Device device)
      : device_(device),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())) {}

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
    // What warm-up has left in the allocator's cache is of no use to a graph, which has its own memory.
    c10::cuda::CUDACachingAllocator::emptyCache();
    graph_.emplace();
    const auto pool = at::cuda::graph_pool_handle();
    const c10::cuda::CUDAStreamGuard on_stream(stream_);
    // Threads that load data may go on allocating meanwhile.
    graph_->capture_begin(pool, cudaStreamCaptureModeThreadLocal);
    std::exception_ptr failure;
    try {
      work();
    } catch (...) {
      failure = std::current_exception();
    }
    try {
      graph_->capture_end();
    } catch (const c10::Error&) {
      if (failure == nullptr) failure = std::current_exception();
      give_up(pool);
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
  // A capture that fails in the middle leaves the allocator collecting memory for it.
  void give_up(at::cuda::MempoolId_t pool) const {
    try {
      c10::cuda::CUDACachingAllocator::endAllocateToPool(device_.index(), pool);
      c10::cuda::CUDACachingAllocator::releasePool(device_.index(), pool);
    } catch (const c10::Error&) {  // it had got further than that
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
