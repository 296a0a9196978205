#pragma once

#include "src/comm/watch.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>

// The ends of a transport whose collectives run on a device: NCCL.
//
// Its works' futures are complete when the kernels are queued. So nothing but Work::isCompleted() tells
// whether a collective has run, and a kernel that waits for a rank which never comes ends by abort()
// only. A thread asks for both. What it cannot do is to make a call throw that waits for the device
// itself, such as Tensor::item(): that returns when the kernels were aborted, and the next call of the
// group throws.
namespace semitone::comm {

struct QueuedTransportOptions {
  std::shared_ptr<Watch> watch;
  std::chrono::milliseconds timeout{};  // of a collective
  // How long destruction waits for an abort, and three times as long for collectives under way after
  // another rank has left.
  std::chrono::milliseconds patience = std::chrono::seconds(10);
  // Called by the thread before it asks works; what it returns lives as long as the thread.
  std::function<std::shared_ptr<void>()> enter_thread;
};

class QueuedTransport {
 public:
  QueuedTransport(c10::intrusive_ptr<c10d::Backend> transport,
                  const QueuedTransportOptions& options);
  ~QueuedTransport();
  QueuedTransport(const QueuedTransport&) = delete;
  QueuedTransport& operator=(const QueuedTransport&) = delete;

  // A collective has been queued.
  void add(const c10::intrusive_ptr<c10d::Work>& work, const std::string& collective);

  // Waits until the device is done with a work; CommError if a rank is lost or late.
  void wait(const c10::intrusive_ptr<c10d::Work>& work, const std::string& collective) const;

  // Ends the kernels under way, on a thread of its own.
  void cut_off();

  // The CommError of a collective that did not end well; null if there is none.
  std::exception_ptr failure() const;

  // Waits for the kernels under way, and lets go of the transport; or aborts them if a rank is lost or
  // late, or if `cut_off` was called. Returns within seconds then, even if the abort does not.
  void finish();

 private:
  struct State;
  static void look_after(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace semitone::comm
