#include "src/comm/watched_backend.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/comm/ranks.h"
#include "src/comm/strings.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <fmt/format.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace semitone::comm {
namespace {

using Clock = std::chrono::steady_clock;
using c10::ivalue::Future;

// A call is compared by this many characters of its description, and a checksum of all of it.
constexpr std::size_t kCallBytes = 512;
constexpr std::size_t kChecksumDigits = 8;

// FNV-1a: the same on every machine.
std::uint32_t checksum(std::string_view text) {
  std::uint32_t hash = 2166136261u;
  for (const char letter : text) {
    hash = (hash ^ static_cast<unsigned char>(letter)) * 16777619u;
  }
  return hash;
}

}  // namespace

// A collective in progress. It ends with the transport's result, or earlier with the loss of a
// rank.
class WatchedBackend::Work final : public c10d::Work {
 public:
  // @param queued  the transport whose device a barrier waits for; null if the future is sufficient
  Work(const c10::intrusive_ptr<c10d::Work>& inner, std::string collective,
       std::shared_ptr<QueuedTransport> queued)
      : c10d::Work(-1, inner->retrieveOpType()),
        inner_(inner),
        collective_(std::move(collective)),
        queued_(std::move(queued)),
        future_(c10::make_intrusive<Future>(inner->getFuture()->elementType(),
                                            inner->getFuture()->devices())) {}

  const std::string& collective() const { return collective_; }
  Clock::time_point started() const { return started_; }

  c10::intrusive_ptr<Future> getFuture() override { return future_; }
  void synchronize() override { inner_->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = c10d::Work::wait(timeout);
    if (queued_ != nullptr && retrieveOpType() == c10d::OpType::BARRIER)
      queued_->wait(inner_, collective_);
    return done;
  }

  void succeed(Future& result) {
    if (!claim_end()) return;
    future_->markCompleted(result.value(), result.storages());
    finish();
  }
  void fail(const std::exception_ptr& error) {
    if (!claim_end()) return;
    future_->setError(error);
    finish(error);
  }

 private:
  // Whether this call ends it.
  bool claim_end() {
    const std::lock_guard lock(mutex_);
    return !std::exchange(ending_, true);
  }

  const c10::intrusive_ptr<c10d::Work> inner_;
  const std::string collective_;
  const std::shared_ptr<QueuedTransport> queued_;
  const Clock::time_point started_ = Clock::now();
  const c10::intrusive_ptr<Future> future_;
  bool ending_ = false;
};

// A message from one rank to another, for which the transport has no future: wait() waits for it,
// and ends when a rank is lost.
class WatchedBackend::Transfer final : public c10d::Work {
 public:
  Transfer(c10::intrusive_ptr<c10d::Work> inner, std::string what, std::shared_ptr<Watch> watch,
           std::chrono::milliseconds timeout)
      : c10d::Work(-1, inner->retrieveOpType()),
        inner_(std::move(inner)),
        what_(std::move(what)),
        watch_(std::move(watch)),
        timeout_(timeout) {}

  bool wait(std::chrono::milliseconds) override {
    std::string problem = "it was interrupted";
    try {
      if (inner_->wait(timeout_)) return true;
    } catch (const c10::Error& error) {
      problem = error.what_without_backtrace();
    } catch (const std::exception& error) {
      problem = error.what();
    }
    std::rethrow_exception(watch_->explain(what_, problem, /*timed_out=*/false));
  }
  void interrupt() { inner_->abort(); }

 private:
  const c10::intrusive_ptr<c10d::Work> inner_;
  const std::string what_;
  const std::shared_ptr<Watch> watch_;
  const std::chrono::milliseconds timeout_;
};

// The collectives in progress. Separate from the backend, because the transport's threads may
// report an end long after the backend was destroyed.
class WatchedBackend::Unfinished {
 public:
  Unfinished(std::shared_ptr<Watch> watch, std::chrono::milliseconds timeout,
             std::chrono::milliseconds patience)
      : watch_(std::move(watch)), timeout_(timeout), patience_(patience) {}

  void add(const c10::intrusive_ptr<Work>& work) {
    const std::lock_guard lock(mutex_);
    works_.insert(work);
  }

  void add(const c10::intrusive_ptr<Transfer>& transfer) {
    const std::lock_guard lock(mutex_);
    std::erase_if(transfers_, [](const auto& earlier) { return earlier.expired(); });
    transfers_.emplace_back(transfer);
  }

  // The transport's result has arrived.
  void end(const c10::intrusive_ptr<Work>& work, Future& result) {
    if (!result.hasError()) {
      work->succeed(result);
    } else if (const auto watch = this->watch()) {
      // A transport may give up slightly before its timeout.
      const bool timed_out = Clock::now() - work->started() >= timeout_ * 9 / 10;
      failed_ = true;
      work->fail(watch->explain(work->collective(), what_of(result.exception_ptr()), timed_out));
    }
    {
      const std::lock_guard lock(mutex_);
      works_.erase(work);
    }
    empty_.notify_all();
  }

  // A rank is lost.
  void fail_all() {
    const auto watch = this->watch();
    if (watch == nullptr) return;
    failed_ = true;
    std::set<c10::intrusive_ptr<Work>> works;
    {
      const std::lock_guard lock(mutex_);
      works.swap(works_);
      for (const auto& transfer : transfers_) {
        if (const auto running = transfer.lock()) running->interrupt();
      }
    }
    for (const auto& work : works) work->fail(watch->lost(work->collective()));
    empty_.notify_all();
  }

  // Whether all ended successfully, or do so within a while. Those that do not have failed, and
  // their end would not be noticed.
  bool finish() {
    std::set<c10::intrusive_ptr<Work>> left;
    {
      std::unique_lock lock(mutex_);
      empty_.wait_for(lock, patience_, [this] { return works_.empty(); });
      left.swap(works_);
      watch_.reset();
    }
    for (const auto& work : left) {
      work->fail(std::make_exception_ptr(
          CommError("comm." + work->collective(), "the group to exist until it is done",
                    "the group was destroyed", "wait for it first")));
    }
    return left.empty() && !failed_;
  }

 private:
  std::shared_ptr<Watch> watch() {
    const std::lock_guard lock(mutex_);
    return watch_;
  }

  std::shared_ptr<Watch> watch_;
  const std::chrono::milliseconds timeout_;
  const std::chrono::milliseconds patience_;
  std::mutex mutex_;
  std::vector<c10::weak_intrusive_ptr<Transfer>> transfers_;
  std::condition_variable empty_;
  std::set<c10::intrusive_ptr<Work>> works_;
  std::atomic<bool> failed_ = false;
};

namespace {

std::shared_ptr<QueuedTransport> make_queued(const c10::intrusive_ptr<c10d::Backend>& inner,
                                             const WatchedBackendOptions& options) {
  if (!options.is_queued) return nullptr;
  QueuedTransportOptions queued;
  queued.watch = options.watch;
  queued.timeout = options.timeout;
  queued.patience = options.patience;
  queued.enter_thread = options.enter_thread;
  return std::make_shared<QueuedTransport>(inner, queued);
}

}  // namespace

WatchedBackend::WatchedBackend(c10::intrusive_ptr<c10d::Backend> inner,
                               const WatchedBackendOptions& options)
    : c10d::Backend(inner->getRank(), inner->getSize()),
      inner_(std::move(inner)),
      options_(options),
      queued_(make_queued(inner_, options)),
      unfinished_(std::make_shared<Unfinished>(options.watch, options.timeout, options.patience)),
      subscription_(*options.watch, [unfinished = unfinished_, queued = queued_] {
        unfinished->fail_all();
        if (queued != nullptr) queued->abort_kernels();
      }) {}

WatchedBackend::~WatchedBackend() {
  const bool finished = unfinished_->finish();
  if (queued_ != nullptr) {
    if (!finished) queued_->abort_kernels();
    inner_.reset();
    queued_->finish();
    return;
  }
  if (finished) {
    inner_->shutdown();
    return;
  }
  // The transport's threads may wait for a lost rank, and its destructor for these threads. They
  // are abandoned until their timeout, since Gloo cannot wake them (closing its connections does
  // not).
  inner_->abort();
  static_cast<void>(inner_.release());
}

c10::intrusive_ptr<c10d::Work> WatchedBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                         const c10d::BroadcastOptions& options) {
  return checked("broadcast", fmt::format("{} from rank {}", describe(tensors), options.rootRank),
                 [&] { return inner_->broadcast(tensors, options); });
}

c10::intrusive_ptr<c10d::Work> WatchedBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                         const c10d::AllreduceOptions& options) {
  return checked("all_reduce", describe(tensors),
                 [&] { return inner_->allreduce(tensors, options); });
}

c10::intrusive_ptr<c10d::Work> WatchedBackend::allgather(
    std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  return checked("all_gather", describe(inputs),
                 [&] { return inner_->allgather(outputs, inputs, options); });
}

c10::intrusive_ptr<c10d::Work> WatchedBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  return checked("reduce_scatter", describe({input}),
                 [&] { return inner_->_reduce_scatter_base(output, input, options); });
}

c10::intrusive_ptr<c10d::Work> WatchedBackend::reduce(std::vector<at::Tensor>& tensors,
                                                      const c10d::ReduceOptions& options) {
  return checked("reduce", fmt::format("{} to rank {}", describe(tensors), options.rootRank),
                 [&] { return inner_->reduce(tensors, options); });
}

c10::intrusive_ptr<c10d::Work> WatchedBackend::gather(std::vector<std::vector<at::Tensor>>& outputs,
                                                      std::vector<at::Tensor>& inputs,
                                                      const c10d::GatherOptions& options) {
  return checked("gather", fmt::format("{} to rank {}", describe(inputs), options.rootRank),
                 [&] { return inner_->gather(outputs, inputs, options); });
}

c10::intrusive_ptr<c10d::Work> WatchedBackend::scatter(std::vector<at::Tensor>& outputs,
                                                       std::vector<std::vector<at::Tensor>>& inputs,
                                                       const c10d::ScatterOptions& options) {
  return checked("scatter", fmt::format("{} from rank {}", describe(outputs), options.rootRank),
                 [&] { return inner_->scatter(outputs, inputs, options); });
}

// Extents of parts may differ between ranks: who passes them compares them.
c10::intrusive_ptr<c10d::Work> WatchedBackend::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
    std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  const bool equal_parts = input_splits.empty() && output_splits.empty();
  return checked(
      "all_to_all", equal_parts ? describe({input}) : dtype_name(input.scalar_type()),
      [&] { return inner_->alltoall_base(output, input, output_splits, input_splits, options); });
}

c10::intrusive_ptr<c10d::Work> WatchedBackend::send(std::vector<at::Tensor>& tensors, int to,
                                                    int tag) {
  return transferred("send", [&] { return inner_->send(tensors, to, tag); });
}

c10::intrusive_ptr<c10d::Work> WatchedBackend::recv(std::vector<at::Tensor>& tensors, int from,
                                                    int tag) {
  return transferred("receive", [&] { return inner_->recv(tensors, from, tag); });
}

c10::intrusive_ptr<c10d::Work> WatchedBackend::barrier(const c10d::BarrierOptions& options) {
  return checked("barrier", "", [&] { return inner_->barrier(options); });
}

void WatchedBackend::announce(const std::string& collective, const std::string& arguments) {
  if (options_.check == CheckLevel::calls) compare(collective, arguments);
}

template <typename Start>
c10::intrusive_ptr<c10d::Work> WatchedBackend::checked(const std::string& collective,
                                                       const std::string& arguments,
                                                       Start&& start) {
  if (options_.check == CheckLevel::full) compare(collective, arguments);
  return watched(collective, std::forward<Start>(start));
}

template <typename Start>
c10::intrusive_ptr<c10d::Work> WatchedBackend::watched(const std::string& collective,
                                                       Start&& start) {
  if (options_.counts_calls) options_.watch->count_call();
  require_no_loss(collective);
  const auto inner = started(collective, std::forward<Start>(start));
  options_.watch->count_start();
  if (queued_ != nullptr) queued_->add(inner, collective);
  auto work = c10::make_intrusive<Work>(inner, collective, queued_);
  unfinished_->add(work);
  // A rank may have been lost after the check above.
  if (options_.watch->loss().has_value()) unfinished_->fail_all();
  inner->getFuture()->addCallback(
      [unfinished = unfinished_, work](Future& result) { unfinished->end(work, result); });
  return work;
}

void WatchedBackend::require_no_loss(const std::string& collective) const {
  if (const auto lost = options_.watch->lost(collective)) std::rethrow_exception(lost);
  if (queued_ == nullptr) return;
  if (const auto failure = queued_->failure()) std::rethrow_exception(failure);
}

template <typename Start>
c10::intrusive_ptr<c10d::Work> WatchedBackend::transferred(const std::string& what, Start&& start) {
  require_no_loss(what);
  auto inner = started(what, std::forward<Start>(start));
  options_.watch->count_start();
  if (queued_ != nullptr) {
    queued_->add(inner, what);
    return inner;
  }
  auto transfer =
      c10::make_intrusive<Transfer>(std::move(inner), what, options_.watch, options_.timeout);
  unfinished_->add(transfer);
  // A rank may have been lost after the check above.
  if (options_.watch->loss().has_value()) unfinished_->fail_all();
  return transfer;
}

template <typename Start>
c10::intrusive_ptr<c10d::Work> WatchedBackend::started(const std::string& collective,
                                                       Start&& start) {
  try {
    return start();
  } catch (const c10::DistError& error) {
    // NCCL connects the ranks in their first collective.
    std::rethrow_exception(
        options_.watch->explain(collective, error.what_without_backtrace(), false));
  } catch (const c10::Error& error) {
    // Refused before anything was sent: the transport does not support the tensor.
    throw Error("comm." + collective, "tensors that " + getBackendName() + " takes",
                error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::rethrow_exception(options_.watch->explain(collective, error.what(), false));
  }
}

// Sends a description of the next call, of any kind, to all other ranks.
void WatchedBackend::compare(const std::string& collective, const std::string& arguments) {
  const std::string mine = collective + (arguments.empty() ? "" : " " + arguments);
  std::string message = fmt::format("{:08x}{}", checksum(mine), mine);
  message.resize(kCallBytes);
  std::vector<at::Tensor> inputs{to_bytes(message, kCallBytes).to(options_.device)};
  const at::Tensor all =
      at::empty({getSize(), static_cast<std::int64_t>(kCallBytes)}, inputs[0].options());
  std::vector<std::vector<at::Tensor>> outputs{all.unbind()};
  watched(collective, [&] { return inner_->allgather(outputs, inputs); })->wait();
  const std::string strings = to_string(all, all.numel());
  std::map<std::string, std::vector<int>> callers;
  for (std::size_t rank = 0; rank < options_.members.size(); ++rank) {
    callers[strings.substr(rank * kCallBytes, kCallBytes)].push_back(options_.members[rank]);
  }
  if (callers.size() == 1) return;
  std::string list;
  for (const auto& [call, ranks] : callers) {
    list += fmt::format("{}{}: {}", list.empty() ? "" : "; ", name_ranks(ranks),
                        call.substr(kChecksumDigits).c_str());
  }
  throw CommError("comm." + collective, "the same call on all ranks", list,
                  "run the same program with the same model on every rank");
}

std::string describe(const std::vector<at::Tensor>& tensors) {
  std::string text;
  for (const at::Tensor& tensor : tensors) {
    text += fmt::format("{}{}{}", text.empty() ? "" : ", ", dtype_name(tensor.scalar_type()),
                        c10::str(tensor.sizes()));
  }
  return text;
}

}  // namespace semitone::comm
