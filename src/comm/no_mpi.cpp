#include "semitone/core/error.h"
#include "src/comm/backends.h"

namespace semitone::comm {

bool has_mpi() {
  return false;
}

c10::intrusive_ptr<c10d::Backend> make_mpi(const BackendRequest&) {
  throw Error(
      "comm.init", "a LibTorch that was built with MPI for the backend mpi", "one without",
      "processes that mpirun starts can use gloo: init(\"env://\") reads Open MPI's variables");
}

}  // namespace semitone::comm
