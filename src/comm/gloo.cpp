// The only file that includes Gloo's headers. Their version differs from the Gloo inside LibTorch:
// only pointers to its types are used, and only functions that LibTorch exports.
#include "src/comm/backends.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>

namespace semitone::comm {
namespace {

// All ranks are present when the transport connects them.
constexpr std::chrono::milliseconds kConnecting(60'000);

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo(const BackendRequest& request) {
  auto options = c10d::ProcessGroupGloo::Options::create(std::min(request.timeout, kConnecting));
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(request.address));
  auto gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(request.store, request.rank, request.size,
                                                          options);
  gloo->setTimeout(request.timeout);
  return gloo;
}

}  // namespace semitone::comm
