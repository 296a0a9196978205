// The only file that sees Gloo's headers. They may be of another version than the Gloo inside
// LibTorch: of its types only pointers are used here, and tests/comm/gloo_test.cpp trains over the
// result.
#include "src/comm/backends.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace semitone::comm {

c10::intrusive_ptr<c10d::Backend> make_gloo(const BackendRequest& request) {
  auto options = c10d::ProcessGroupGloo::Options::create(request.timeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(request.address));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(request.store, request.rank, request.size,
                                                     options);
}

}  // namespace semitone::comm
