#include "semitone/data/detail/prefetcher.h"

#include "semitone/core/events.h"
#include "src/core/openmp.h"
#include "src/data/mover.h"

#include <ATen/Parallel.h>
#include <c10/core/StreamGuard.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace semitone::data::detail {
namespace {

// A second team of OpenMP's threads would take the cores from the training.
void use_one_core() {
#if AT_PARALLEL_OPENMP
  at::get_num_threads();  // sets the number when a thread first asks for it
  omp_set_num_threads(1);
#endif
}

}  // namespace

// The slots that were read and not yet asked for. Only the thread that reads adds slots; the last
// one is the end or a failure.
class Prefetcher::Pass {
 public:
  Pass(Fetch fetch, const Mover& mover) : fetch_(std::move(fetch)), mover_(mover) {
    if (mover_.options().background()) thread_ = std::thread([this] { read_ahead(); });
  }
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;
  ~Pass() {
    {
      const std::scoped_lock lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  // A batch and the end of its copies, or the reason why there is none.
  struct Slot {
    Fetched fetched;
    std::optional<c10::Event> mark;
    std::exception_ptr failure;

    bool is_last() const { return fetched.batch == nullptr; }
  };

  Slot next() {
    if (!thread_.joinable()) return next_of_this_thread();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !slots_.empty(); });
    Slot slot = std::move(slots_.front());
    slots_.pop_front();
    lock.unlock();
    changed_.notify_all();
    return slot;
  }

 private:
  Slot read() {
    Slot slot;
    try {
      const c10::OptionalStreamGuard on_side(mover_.side());
      slot.fetched = fetch_();
      slot.mark = mover_.mark();
    } catch (...) {
      slot = {{}, {}, std::current_exception()};
    }
    return slot;
  }

  void read_ahead() {
    use_one_core();
    for (bool is_last = false; !is_last;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stopped_ || slots_.size() < mover_.options().depth(); });
      if (stopped_) return;
      lock.unlock();
      Slot slot = read();
      is_last = slot.is_last();
      lock.lock();
      slots_.push_back(std::move(slot));
      lock.unlock();
      changed_.notify_all();
    }
  }

  // Returns a batch whose copies began at an earlier call, and begins those of later ones.
  Slot next_of_this_thread() {
    const auto has_end = [this] { return !slots_.empty() && slots_.back().is_last(); };
    if (slots_.empty()) slots_.push_back(read());
    while (slots_.size() <= mover_.options().depth() && !has_end()) slots_.push_back(read());
    Slot slot = std::move(slots_.front());
    slots_.pop_front();
    return slot;
  }

  Fetch fetch_;
  const Mover& mover_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Slot> slots_;
  bool stopped_ = false;
  std::thread thread_;
};

Prefetcher::Prefetcher(const PrefetchOptions& options)
    : mover_(std::make_unique<const Mover>(options)) {}

Prefetcher::~Prefetcher() = default;

at::Tensor Prefetcher::move(const at::Tensor& tensor) const {
  return mover_->move(tensor);
}

void Prefetcher::stop() {
  pass_.reset();
}

void Prefetcher::start(Fetch fetch) {
  mover_->wait_for_caller();
  pass_ = std::make_unique<Pass>(std::move(fetch), *mover_);
}

std::shared_ptr<void> Prefetcher::next() {
  if (pass_ == nullptr) return nullptr;
  const events::PhaseScope phase(events::Phase::data);
  const Pass::Slot slot = pass_->next();
  if (slot.is_last()) stop();
  if (slot.failure != nullptr) std::rethrow_exception(slot.failure);
  mover_->hand_over(slot.mark, slot.fetched.tensors);
  return slot.fetched.batch;
}

const PrefetchOptions& Prefetcher::options() const {
  return mover_->options();
}

}  // namespace semitone::data::detail
