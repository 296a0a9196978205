#pragma once

#include "semitone/comm/init_options.h"
#include "src/comm/queued_transport.h"
#include "src/comm/watch.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace semitone::comm {

struct WatchedBackendOptions {
  std::shared_ptr<Watch> watch;
  CheckLevel check = CheckLevel::calls;
  c10::Device device = c10::kCPU;  // of the tensors that the transport takes
  std::chrono::milliseconds timeout{};
  std::vector<int> members;   // its ranks, by their numbers in the group of all processes
  bool counts_calls = false;  // for the group of all processes: its calls tell which rank is late
  bool is_queued = false;     // see queued_transport.h
  std::function<std::shared_ptr<void>()> enter_thread;  // of QueuedTransportOptions
  // How long destruction waits for collectives in progress; also QueuedTransportOptions::patience.
  std::chrono::milliseconds patience = std::chrono::seconds(10);
};

// Wraps a transport, so that all its users (Semitone's groups, and c10d's Reducer in a backward
// pass) get a CommError that names the rank at fault: at once when a rank is lost, not only at the
// transport's own timeout. It implements the collectives that these use; Backend refuses the
// others.
class WatchedBackend final : public c10d::Backend {
 public:
  WatchedBackend(c10::intrusive_ptr<c10d::Backend> inner, const WatchedBackendOptions& options);
  ~WatchedBackend() override;

  // For a call of the program on a Group: compares it with the other ranks' calls, unless the check
  // is off or is made for every collective anyway.
  void announce(const std::string& collective, const std::string& arguments);

  const std::string getBackendName() const override { return inner_->getBackendName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs,
                                        std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs,
                                         std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<std::int64_t>& output_splits,
                                               std::vector<std::int64_t>& input_splits,
                                               const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;
  // Not collectives: they are neither compared nor counted.
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override;

 private:
  class Work;
  class Transfer;
  class Unfinished;

  template <typename Start>
  c10::intrusive_ptr<c10d::Work> checked(const std::string& collective,
                                         const std::string& arguments, Start&& start);
  template <typename Start>
  c10::intrusive_ptr<c10d::Work> watched(const std::string& collective, Start&& start);
  template <typename Start>
  c10::intrusive_ptr<c10d::Work> started(const std::string& collective, Start&& start);
  template <typename Start>
  c10::intrusive_ptr<c10d::Work> transferred(const std::string& what, Start&& start);
  void compare(const std::string& collective, const std::string& arguments);
  void require_no_loss(const std::string& collective) const;

  c10::intrusive_ptr<c10d::Backend> inner_;
  const WatchedBackendOptions options_;
  const std::shared_ptr<QueuedTransport> queued_;  // null if it is none
  const std::shared_ptr<Unfinished> unfinished_;
  const Watch::Subscription subscription_;
};

// "float32[2, 3], int64[]": what compare compares.
std::string describe(const std::vector<at::Tensor>& tensors);

}  // namespace semitone::comm
