#include "semitone/core/error.h"
#include "src/comm/backends.h"

namespace semitone::comm {

bool has_nccl() {
  return false;
}

Transport make_nccl(const BackendRequest&) {
  throw Error("comm.init", "a build with NCCL for the backend nccl", "one without",
              "configure with SEMITONE_CUDA=ON and a LibTorch that has CUDA, or use gloo");
}

std::string gpu_identity(c10::Device device) {
  return device.str();
}

}  // namespace semitone::comm
