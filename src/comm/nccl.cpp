#include "src/comm/backends.h"

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace semitone::comm {

bool has_nccl() {
  return true;
}

c10::intrusive_ptr<c10d::Backend> make_nccl(const BackendRequest& request) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = request.timeout;
  auto nccl = c10::make_intrusive<c10d::ProcessGroupNCCL>(request.store, request.rank, request.size,
                                                          options);
  // Barriers, which have no tensors, would guess it from the rank.
  nccl->setBoundDeviceId(request.device);
  return nccl;
}

}  // namespace semitone::comm
