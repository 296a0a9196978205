#include "src/comm/backends.h"

#include <torch/csrc/distributed/c10d/ProcessGroupMPI.hpp>

namespace semitone::comm {

bool has_mpi() {
  return true;
}

c10::intrusive_ptr<c10d::Backend> make_mpi(const BackendRequest&) {
  return c10d::ProcessGroupMPI::createProcessGroupMPI();
}

}  // namespace semitone::comm
