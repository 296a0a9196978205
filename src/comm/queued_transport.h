#pragma once

#include "src/comm/watch.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>

// The completion of collectives that run on a device: NCCL.
//
// The futures of NCCL's works complete when the kernels are queued. Only Work::isCompleted() tells
// whether a collective has run, and only abort() ends a kernel that waits for a lost rank. A thread
// therefore polls isCompleted(), and calls abort() if a rank is lost or late. Calls that wait for
// the device itself, such as Tensor::item(), do not throw then: they return when the kernels were
// aborted, and the next call of the group throws.
namespace semitone::comm {

struct QueuedTransportOptions {
  std::shared_ptr<Watch> watch;
  std::chrono::milliseconds timeout{};  // of a collective
  // How long destruction waits for an abort. If another rank has left the group, and no collective
  // completes for three times as long, those in progress fail.
  std::chrono::milliseconds patience = std::chrono::seconds(10);
  // Called by the thread before it polls works; the result lives as long as the thread.
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

  // Ends the kernels in progress, on a separate thread.
  void abort_kernels();

  // The CommError of a collective that failed; null if there is none.
  std::exception_ptr failure() const;

  // Waits for the kernels in progress, and releases the transport. If a rank is lost or late, or
  // `abort_kernels` was called, it aborts them instead, and returns within seconds even if the
  // abort does not.
  void finish();

 private:
  struct State;
  static void poll_works(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace semitone::comm
