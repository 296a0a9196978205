#include "src/amp/step_graph.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
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
    graph_.emplace();
    const c10::cuda::CUDAStreamGuard on_stream(stream_);
    // Threads that load data may go on allocating meanwhile.
    graph_->capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    try {
      work();
    } catch (...) {
      const std::exception_ptr failure = std::current_exception();
      try {
        graph_->capture_end();       // else the stream would stay in its capture
      } catch (const c10::Error&) {  // what work() did has ended it
      }
      graph_.reset();
      std::rethrow_exception(failure);
    }
    graph_->capture_end();
  }

  void replay() override {
    const c10::cuda::CUDAGuard on_device(device_.index());
    graph_->replay();
  }

 private:
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
