#include "src/comm/backends.h"

namespace semitone::comm {

Backend nccl_backend() {
  Backend backend;
  backend.name = "nccl";
  backend.device = c10::DeviceType::CUDA;
  backend.type = c10d::ProcessGroup::BackendType::NCCL;
  backend.remedy = "configure with SEMITONE_CUDA=ON and a LibTorch that has NCCL";
  backend.warning =
      "this build has no NCCL, so groups use gloo, with tensors on the CPU; configure with "
      "SEMITONE_NCCL_INCLUDE_DIR=<folder of nccl.h>";
  return backend;
}

}  // namespace semitone::comm
