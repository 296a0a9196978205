#include "src/comm/backends.h"
#include "src/core/env.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/env.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <fmt/format.h>

#include <memory>
#include <string>
#include <utility>

namespace semitone::comm {
namespace {

// NCCL's watchdog's reaction to a collective that failed or took too long. The default, 3, throws
// in the watchdog's own thread, which ends the process, for a loss that raises a CommError on the
// other ranks. 2 aborts the communicator, and the caller notices.
constexpr auto kErrorHandling = "2";

// The watchdog's timeout starts after Semitone's, so that the error names a rank.
constexpr std::chrono::seconds kLater(60);

Transport make_nccl(const BackendRequest& request, Watch&) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = request.timeout + kLater;
  c10::utils::set_env(env::kNcclErrorHandling.name, kErrorHandling, /*overwrite=*/false);
  auto nccl = c10::make_intrusive<c10d::ProcessGroupNCCL>(request.store, request.rank, request.size,
                                                          options);
  // Barriers, which have no tensors, would guess the device from the rank.
  nccl->setBoundDeviceId(request.device);
  Transport transport;
  transport.backend = std::move(nccl);
  transport.is_queued = true;
  // While a thread records a CUDA graph, other threads may not query an event, unless they declare
  // that it does not concern that graph.
  transport.enter_thread = [device = request.device]() -> std::shared_ptr<void> {
    c10::cuda::set_device(device.index());
    return std::make_shared<c10::cuda::CUDAStreamCaptureModeGuard>(
        cudaStreamCaptureModeThreadLocal);
  };
  return transport;
}

std::string gpu_identity(c10::Device device) {
  // Parts of one GPU (MIG) also have different identities.
  const auto& uuid = at::cuda::getDeviceProperties(device.index())->uuid.bytes;
  std::string text = "GPU-";
  for (const char byte : uuid) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return text;
}

}  // namespace

Backend nccl_backend() {
  Backend backend;
  backend.name = "nccl";
  backend.available = true;
  backend.device = c10::DeviceType::CUDA;
  backend.type = c10d::ProcessGroup::BackendType::NCCL;
  backend.has_reduce_scatter = true;
  backend.make = make_nccl;
  backend.device_identity = gpu_identity;
  return backend;
}

}  // namespace semitone::comm
