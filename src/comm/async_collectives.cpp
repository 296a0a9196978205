#include "semitone/comm/group.h"
#include "semitone/core/error.h"
#include "src/comm/backends.h"
#include "src/comm/checks.h"
#include "src/comm/process_group.h"
#include "src/core/exact_weights.h"
#include "src/core/unreduced.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/types.h>

#include <fmt/format.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// Collectives that return at once.
namespace semitone::comm {

using c10::ivalue::Future;

struct Work::State {
  c10::intrusive_ptr<Future> future;
  std::vector<at::Tensor> written;  // whose exact weights are to be set
  std::atomic<bool> is_settled = false;

  // In a group of one rank, where a tensor keeps its values.
  static Work completed(const at::Tensor& tensor) {
    auto state = std::make_shared<State>();
    state->future = c10::make_intrusive<Future>(c10::TensorType::get());
    state->future->markCompleted(tensor);
    return Work(std::move(state));
  }

  // In a group of one rank, which receives what it sends.
  static Work copied(const at::Tensor& output, const at::Tensor& tensor) {
    output.detach().copy_(tensor.detach());
    mark_written(output);
    Work work = completed(output);
    work.state_->written = {output};
    return work;
  }

  // Completes on the thread that ends the transport's work, after `finish`.
  template <typename Finish>
  static Work after(const c10::intrusive_ptr<c10d::Work>& work,
                    const std::vector<at::Tensor>& written, Finish&& finish) {
    auto state = std::make_shared<State>();
    state->written = written;
    state->future = work->getFuture()->then(
        [written, finish = std::forward<Finish>(finish)](Future& done) -> c10::IValue {
          done.value();  // throws if it failed
          finish();
          for (const at::Tensor& tensor : written) mark_written(tensor);
          return written.front();
        },
        c10::TensorType::get());
    return Work(std::move(state));
  }
  static Work after(const c10::intrusive_ptr<c10d::Work>& work,
                    const std::vector<at::Tensor>& written) {
    return after(work, written, [] {});
  }
};

namespace {

// A mean is a sum that is divided: Gloo has no mean.
int divisor_of(ReduceOp op, const Group& group) {
  return op == ReduceOp::mean ? group.size() : 1;
}
void divide(const at::Tensor& sum, int divisor) {
  if (divisor != 1) sum.detach().div_(divisor);
}

}  // namespace

Work::Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

void Work::wait() {
  state_->future->waitAndThrow();
  // Here, since a holder of masters is not to be called on the transport's thread.
  if (state_->is_settled.exchange(true)) return;
  for (const at::Tensor& tensor : state_->written) settle_exact_weight(tensor);
}

bool Work::done() const {
  return state_->future->completed();
}

c10::intrusive_ptr<Future> Work::future() const {
  return state_->future;
}

Work Group::all_reduce_async(at::Tensor& tensor, ReduceOp op) const {
  check_reducible(*this, tensor, "all_reduce", op);
  clear_unreduced(tensor);
  if (impl_->process_group == nullptr) return Work::State::completed(tensor);
  std::vector<at::Tensor> tensors{tensor.detach()};
  c10d::AllreduceOptions options;
  options.reduceOp = to_c10d(op);
  const int divisor = divisor_of(op, *this);
  return Work::State::after(impl_->process_group->allreduce(tensors, options), {tensor},
                            [tensor, divisor] { divide(tensor, divisor); });
}

Work Group::broadcast_async(at::Tensor& tensor, int root) const {
  check_tensor(*this, tensor, "broadcast");
  check_root(root, size(), "broadcast");
  if (impl_->process_group == nullptr) return Work::State::completed(tensor);
  std::vector<at::Tensor> tensors{transportable(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return Work::State::after(impl_->process_group->broadcast(tensors, options), {tensor});
}

Work Group::all_gather_async(const std::vector<at::Tensor>& outputs,
                             const at::Tensor& tensor) const {
  check_tensor(*this, tensor, "all_gather");
  if (outputs.size() != static_cast<std::size_t>(size())) {
    throw Error("comm.all_gather", fmt::format("{} outputs", size()),
                std::to_string(outputs.size()));
  }
  for (const at::Tensor& output : outputs)
    check_output(*this, output, tensor.sizes(), tensor, "all_gather");
  if (impl_->process_group == nullptr) return Work::State::copied(outputs[0], tensor);
  std::vector<at::Tensor> inputs{transportable(tensor)};
  std::vector<std::vector<at::Tensor>> lists(1);
  for (const at::Tensor& output : outputs) lists[0].push_back(transportable(output));
  return Work::State::after(impl_->process_group->allgather(lists, inputs), outputs);
}

Work Group::reduce_scatter_async(at::Tensor& output, const at::Tensor& tensor, ReduceOp op) const {
  check_reducible(*this, tensor, "reduce_scatter", op);
  check_divisible(*this, tensor, "reduce_scatter");
  check_output(*this, output, part_sizes(*this, tensor), tensor, "reduce_scatter");
  if (impl_->process_group == nullptr) return Work::State::copied(output, tensor);
  const int divisor = divisor_of(op, *this);
  if (find_backend(impl_->backend)->has_reduce_scatter) {
    at::Tensor part = output.detach();
    at::Tensor whole = tensor.detach();
    c10d::ReduceScatterOptions options;
    options.reduceOp = to_c10d(op);
    // Not by the process group: LibTorch 2.15 has another name for it there, and deprecates this one.
    return Work::State::after(impl_->transport->_reduce_scatter_base(part, whole, options),
                              {output}, [output, divisor] { divide(output, divisor); });
  }
  // As LibTorch's Gloo does, which has no native operation for this.
  std::vector<at::Tensor> all{tensor.detach().clone()};
  c10d::AllreduceOptions options;
  options.reduceOp = to_c10d(op);
  const at::Tensor part = all[0].chunk(size())[static_cast<std::size_t>(rank())];
  return Work::State::after(impl_->process_group->allreduce(all, options), {output},
                            [output, part, divisor] {
                              output.detach().copy_(part);
                              divide(output, divisor);
                            });
}

Work Group::all_to_all_async(at::Tensor& output, const at::Tensor& tensor) const {
  check_tensor(*this, tensor, "all_to_all");
  check_divisible(*this, tensor, "all_to_all");
  check_output(*this, output, tensor.sizes(), tensor, "all_to_all");
  if (impl_->process_group == nullptr) return Work::State::copied(output, tensor);
  at::Tensor received = transportable(output).view(-1);
  at::Tensor sent = transportable(tensor).view(-1);
  return Work::State::after(start_all_to_all(*this, received, sent), {output});
}

}  // namespace semitone::comm
