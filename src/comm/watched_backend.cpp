#include "src/comm/watched_backend.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/comm/store.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <fmt/format.h>

#include <map>
#include <utility>
#include <vector>

namespace semitone::comm {
namespace {

std::string what_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& caught) {
    return caught.what_without_backtrace();
  } catch (const std::exception& caught) {
    return caught.what();
  } catch (...) {
    return "an unknown error";
  }
}

bool is_comm_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const CommError&) {
    return true;
  } catch (...) {
    return false;
  }
}

class WatchedWork final : public c10d::Work {
 public:
  WatchedWork(c10::intrusive_ptr<c10d::Work> inner, std::shared_ptr<Watch> watch,
              std::string collective)
      : c10d::Work(-1, inner->retrieveOpType()),
        inner_(std::move(inner)),
        watch_(std::move(watch)),
        collective_(std::move(collective)) {}

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void abort() override { inner_->abort(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

  void synchronize() override {
    translated([&] { inner_->synchronize(); });
  }

  bool wait(std::chrono::milliseconds timeout) override {
    bool done = false;
    translated([&] { done = inner_->wait(timeout); });
    return done;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const std::lock_guard lock(future_mutex_);
    if (future_ != nullptr) return future_;
    const auto inner = inner_->getFuture();
    future_ = c10::make_intrusive<c10::ivalue::Future>(inner->elementType(), inner->devices());
    inner->addCallback(
        [future = future_, watch = watch_, collective = collective_](c10::ivalue::Future& done) {
          if (done.hasError()) {
            future->setError(watch->explanation(collective, what_of(done.exception_ptr())));
          } else {
            future->markCompleted(done.value(), done.storages());
          }
        });
    return future_;
  }

 private:
  template <typename Call>
  void translated(Call&& call) {
    try {
      call();
    } catch (const CommError&) {
      throw;
    } catch (...) {
      watch_->explain(collective_, what_of(std::current_exception()));
    }
  }

  c10::intrusive_ptr<c10d::Work> inner_;
  std::shared_ptr<Watch> watch_;
  std::string collective_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

std::string describe(const std::vector<at::Tensor>& tensors) {
  std::string text;
  for (const at::Tensor& tensor : tensors) {
    text += fmt::format("{}{}{}", text.empty() ? "" : ", ", dtype_name(tensor.scalar_type()),
                        c10::str(tensor.sizes()));
  }
  return text;
}

class WatchedBackend final : public c10d::Backend {
 public:
  WatchedBackend(c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<Watch> watch,
                 c10::intrusive_ptr<c10d::Store> store, CheckLevel check)
      : c10d::Backend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        watch_(std::move(watch)),
        store_(std::move(store)),
        check_(check) {}

  const std::string getBackendName() const override { return inner_->getBackendName(); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
  bool supportsCoalescing() const override { return inner_->supportsCoalescing(); }
  void startCoalescing() override { inner_->startCoalescing(); }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    return watched("coalesced", [&] { return inner_->endCoalescing(); });
  }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    compare("broadcast", fmt::format("{} from rank {}", describe(tensors), options.rootRank));
    return watched("broadcast", [&] { return inner_->broadcast(tensors, options); });
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    compare("all_reduce", describe(tensors));
    return watched("all_reduce", [&] { return inner_->allreduce(tensors, options); });
  }
  c10::intrusive_ptr<c10d::Work> allreduce_sparse(std::vector<at::Tensor>& tensors,
                                                  const c10d::AllreduceOptions& options) override {
    return watched("all_reduce (sparse)",
                   [&] { return inner_->allreduce_sparse(tensors, options); });
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    compare("all_reduce (coalesced)", describe(tensors));
    return watched("all_reduce (coalesced)",
                   [&] { return inner_->allreduce_coalesced(tensors, options); });
  }
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& options) override {
    compare("reduce", fmt::format("{} to rank {}", describe(tensors), options.rootRank));
    return watched("reduce", [&] { return inner_->reduce(tensors, options); });
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override {
    compare("all_gather", describe(inputs));
    return watched("all_gather", [&] { return inner_->allgather(outputs, inputs, options); });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    compare("all_gather", describe({input}));
    return watched("all_gather", [&] { return inner_->_allgather_base(output, input, options); });
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override {
    compare("all_gather (coalesced)", describe(inputs));
    return watched("all_gather (coalesced)", [&] {
      return inner_->allgather_into_tensor_coalesced(outputs, inputs, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs,
                                        std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& options) override {
    compare("gather", fmt::format("{} to rank {}", describe(inputs), options.rootRank));
    return watched("gather", [&] { return inner_->gather(outputs, inputs, options); });
  }
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs,
                                         std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& options) override {
    compare("scatter", fmt::format("{} from rank {}", describe(outputs), options.rootRank));
    return watched("scatter", [&] { return inner_->scatter(outputs, inputs, options); });
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ReduceScatterOptions& options) override {
    compare("reduce_scatter", describe(outputs));
    return watched("reduce_scatter",
                   [&] { return inner_->reduce_scatter(outputs, inputs, options); });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    compare("reduce_scatter", describe({output}));
    return watched("reduce_scatter",
                   [&] { return inner_->_reduce_scatter_base(output, input, options); });
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_sizes,
                                               std::vector<int64_t>& input_sizes,
                                               const c10d::AllToAllOptions& options) override {
    return watched("all_to_all", [&] {
      return inner_->alltoall_base(output, input, output_sizes, input_sizes, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    return watched("send", [&] { return inner_->send(tensors, to, tag); });
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from,
                                      int tag) override {
    return watched("recv", [&] { return inner_->recv(tensors, from, tag); });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    compare("barrier", "");
    return watched("barrier", [&] { return inner_->barrier(options); });
  }

 private:
  template <typename Start>
  c10::intrusive_ptr<c10d::Work> watched(const char* collective, Start&& start) {
    try {
      return c10::make_intrusive<WatchedWork>(start(), watch_, collective);
    } catch (const c10::Error& error) {
      // Refused before anything was sent: a tensor that the transport does not take.
      throw Error(std::string("comm.") + collective, "tensors that " + getBackendName() + " takes",
                  error.what_without_backtrace(), "contiguous, dense, on the backend's device");
    } catch (const std::exception& error) {
      watch_->explain(collective, error.what());
    }
  }

  // Every rank writes down what it is about to call, and reads what the others wrote.
  void compare(const std::string& collective, const std::string& arguments) {
    if (check_ == CheckLevel::none) return;
    const std::string prefix = fmt::format("check/{}/", calls_++);
    const std::string mine = collective + (arguments.empty() ? "" : " " + arguments);
    put(*store_, prefix + std::to_string(getRank()), mine);
    std::map<std::string, std::vector<int>> by_call;
    for (int rank = 0; rank < getSize(); ++rank) {
      try {
        by_call[get(*store_, prefix + std::to_string(rank))].push_back(rank);
      } catch (const std::exception&) {
        throw CommError("comm." + collective, fmt::format("all {} ranks to call it", getSize()),
                        fmt::format("no call from rank {}", rank), "this rank called: " + mine,
                        {rank});
      }
    }
    if (by_call.size() == 1) return;
    std::string calls;
    for (const auto& [call, ranks] : by_call) {
      std::string list;
      for (const int rank : ranks) list += (list.empty() ? "" : ", ") + std::to_string(rank);
      calls += fmt::format("{}{} {}: {}", calls.empty() ? "" : "; ",
                           ranks.size() == 1 ? "rank" : "ranks", list, call);
    }
    throw CommError("comm." + collective, "the same call on all ranks", calls,
                    "run the same program on every rank");
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::shared_ptr<Watch> watch_;
  c10::intrusive_ptr<c10d::Store> store_;
  CheckLevel check_;
  std::uint64_t calls_ = 0;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_watched(c10::intrusive_ptr<c10d::Backend> inner,
                                               std::shared_ptr<Watch> watch,
                                               c10::intrusive_ptr<c10d::Store> store,
                                               CheckLevel check) {
  return c10::make_intrusive<WatchedBackend>(std::move(inner), std::move(watch), std::move(store),
                                             check);
}

}  // namespace semitone::comm
