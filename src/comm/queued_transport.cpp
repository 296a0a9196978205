#include "src/comm/queued_transport.h"

#include "semitone/core/error.h"
#include "src/comm/ranks.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace semitone::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// How often the thread polls the oldest work, and a barrier its own. A work holds its tensors while
// it is in the queue: at 50 ms these would be the tensors of several steps.
constexpr milliseconds kPollInterval(2);
constexpr std::chrono::microseconds kBarrierPollInterval(500);

// Factor of the patience after another rank has left: its collectives were done, but this rank's
// part of them may follow long computations.
constexpr int kPatienceFactor = 3;

}  // namespace

// Shared with the threads that shut down or abort the transport, which may outlive it.
struct QueuedTransport::State {
  struct Queued {
    c10::intrusive_ptr<c10d::Work> work;
    std::string collective;
    Clock::time_point since;
  };

  QueuedTransportOptions options;

  std::mutex mutex;  // for what follows
  std::condition_variable changed;
  c10::intrusive_ptr<c10d::Backend> transport;  // the threads have their own
  std::deque<Queued> queue;
  std::exception_ptr failure;
  bool finishing = false;
  bool aborting = false;
  bool ended = false;  // the shutdown or the abort is done
  bool stopping = false;

  // With the mutex held.
  void start_abort(const std::shared_ptr<State>& self) {
    if (std::exchange(aborting, true)) return;
    changed.notify_all();
    std::thread([self, aborted = transport] {
      try {
        aborted->abort();
      } catch (const std::exception&) {  // it took longer than its timeout
      }
      const std::lock_guard lock(self->mutex);
      self->ended = true;
      self->changed.notify_all();
    }).detach();
  }

  void fail(const std::shared_ptr<State>& self, std::exception_ptr error) {
    const std::lock_guard lock(mutex);
    if (failure == nullptr) failure = std::move(error);
    start_abort(self);
  }
};

QueuedTransport::QueuedTransport(c10::intrusive_ptr<c10d::Backend> transport,
                                 const QueuedTransportOptions& options)
    : state_(std::make_shared<State>()) {
  state_->options = options;
  state_->transport = std::move(transport);
  thread_ = std::thread([state = state_] { poll_works(state); });
}

QueuedTransport::~QueuedTransport() {
  finish();
}

void QueuedTransport::add(const c10::intrusive_ptr<c10d::Work>& work,
                          const std::string& collective) {
  const std::lock_guard lock(state_->mutex);
  state_->queue.push_back({work, collective, Clock::now()});
  if (state_->queue.size() == 1) state_->changed.notify_all();
}

void QueuedTransport::wait(const c10::intrusive_ptr<c10d::Work>& work,
                           const std::string& collective) const {
  while (!work->isCompleted()) {
    if (const auto error = failure()) std::rethrow_exception(error);
    if (const auto lost = state_->options.watch->lost(collective)) std::rethrow_exception(lost);
    std::this_thread::sleep_for(kBarrierPollInterval);
  }
  if (const auto error = failure()) std::rethrow_exception(error);
  if (const auto lost = state_->options.watch->lost(collective)) std::rethrow_exception(lost);
  if (const auto error = work->exception()) {
    std::rethrow_exception(state_->options.watch->explain(collective, what_of(error), false));
  }
}

void QueuedTransport::abort_kernels() {
  const std::lock_guard lock(state_->mutex);
  state_->start_abort(state_);
}

std::exception_ptr QueuedTransport::failure() const {
  const std::lock_guard lock(state_->mutex);
  return state_->failure;
}

// The thread's loop: removes works that are done from the queue, and detects those that will not
// finish.
void QueuedTransport::poll_works(const std::shared_ptr<State>& state) {
  const auto guard =
      state->options.enter_thread == nullptr ? nullptr : state->options.enter_thread();
  const auto patience = kPatienceFactor * state->options.patience;
  bool peer_left = false;  // a rank has left, and nothing was done since
  Clock::time_point peer_left_since;
  std::unique_lock lock(state->mutex);
  for (;;) {
    state->changed.wait(lock, [&] { return state->stopping || !state->queue.empty(); });
    if (state->stopping || state->aborting) return;
    const State::Queued oldest = state->queue.front();
    lock.unlock();
    std::exception_ptr failure;
    const bool done = oldest.work->isCompleted();
    const auto now = Clock::now();
    if (done) {
      peer_left = false;
      if (const auto error = oldest.work->exception())
        failure = state->options.watch->explain(oldest.collective, what_of(error), false);
    } else if (now - oldest.since > state->options.timeout) {
      failure = state->options.watch->explain(
          oldest.collective,
          "not done within " +
              seconds(std::chrono::duration<double>(state->options.timeout).count()),
          /*timed_out=*/true);
    } else if (state->options.watch->has_left()) {
      if (!std::exchange(peer_left, true)) peer_left_since = now;
      if (now - peer_left_since > patience)
        failure = state->options.watch->explain(oldest.collective, "a rank has left", false);
    }
    if (failure != nullptr) state->fail(state, std::move(failure));
    lock.lock();
    if (done) {
      state->queue.pop_front();
    } else {
      state->changed.wait_for(lock, kPollInterval,
                              [&] { return state->stopping || state->aborting; });
    }
  }
}

void QueuedTransport::finish() {
  {
    std::unique_lock lock(state_->mutex);
    if (std::exchange(state_->finishing, true)) return;
    if (!state_->aborting) {
      std::thread([state = state_, stopped = state_->transport] {
        bool succeeded = true;
        try {
          stopped->shutdown();
        } catch (const std::exception&) {
          succeeded = false;
        }
        const std::lock_guard guard(state->mutex);
        if (state->aborting) return;  // whose end counts
        if (!succeeded) return state->start_abort(state);
        state->ended = true;
        state->changed.notify_all();
      }).detach();
      // Meanwhile works that are done are removed from the queue, and late ones are detected.
      state_->changed.wait(lock, [this] { return state_->ended || state_->aborting; });
    }
    if (state_->aborting)
      state_->changed.wait_for(lock, state_->options.patience, [this] { return state_->ended; });
    state_->stopping = true;
    state_->changed.notify_all();
  }
  thread_.join();
  c10::intrusive_ptr<c10d::Backend> transport;
  const std::lock_guard lock(state_->mutex);
  state_->queue.clear();
  transport = std::move(state_->transport);
  // Its destructor waits for its own threads. If the abort has not ended, they may not end either.
  if (!state_->ended) static_cast<void>(transport.release());
}

}  // namespace semitone::comm
