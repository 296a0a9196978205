// The only file that includes Gloo's headers. Their version differs from the Gloo inside LibTorch:
// only pointers to its types are used, and only functions that LibTorch exports.
#include "src/comm/backends.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace semitone::comm {
namespace {

// All ranks are present when the transport connects them.
constexpr std::chrono::milliseconds kConnecting(60'000);

c10::intrusive_ptr<c10d::Backend> make_gloo(const BackendRequest& request) {
  auto options = c10d::ProcessGroupGloo::Options::create(std::min(request.timeout, kConnecting));
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(request.address));
  auto gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(request.store, request.rank, request.size,
                                                          options);
  gloo->setTimeout(request.timeout);
  return gloo;
}

// Gloo connects all ranks in its constructor, and waits a minute there for a rank that was lost
// meanwhile. This runs on a separate thread, which is abandoned if the watch reports a loss.
Transport connect_gloo(const BackendRequest& request, Watch& watch) {
  struct Connecting {
    std::mutex mutex;
    std::condition_variable changed;
    c10::intrusive_ptr<c10d::Backend> gloo;
    std::exception_ptr error;
    bool done = false;
    bool lost = false;
  };
  auto connecting = std::make_shared<Connecting>();
  std::thread([connecting, request] {
    c10::intrusive_ptr<c10d::Backend> gloo;
    std::exception_ptr error;
    try {
      gloo = make_gloo(request);
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(connecting->mutex);
    connecting->gloo = std::move(gloo);
    connecting->error = std::move(error);
    connecting->done = true;
    connecting->changed.notify_all();
  }).detach();
  const Watch::Subscription subscription(watch, [connecting] {
    const std::lock_guard lock(connecting->mutex);
    connecting->lost = true;
    connecting->changed.notify_all();
  });
  std::unique_lock lock(connecting->mutex);
  connecting->changed.wait(lock, [&] { return connecting->done || connecting->lost; });
  if (!connecting->done) std::rethrow_exception(watch.lost("init"));
  if (connecting->error != nullptr) std::rethrow_exception(connecting->error);
  Transport transport;
  transport.backend = std::move(connecting->gloo);
  return transport;
}

}  // namespace

Backend gloo_backend() {
  Backend backend;
  backend.name = "gloo";
  backend.available = true;
  backend.type = c10d::ProcessGroup::BackendType::GLOO;
  backend.make = connect_gloo;
  return backend;
}

}  // namespace semitone::comm
