#include "semitone/comm/group.h"

#include "semitone/core/error.h"
#include "src/comm/process_group.h"
#include "src/comm/store.h"
#include "src/comm/watched_backend.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/types.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace semitone::comm {
namespace {

// Coalesced broadcasts go through buffers of this size, as torch's DistributedDataParallel sends a
// model.
constexpr std::size_t kBroadcastBytes = 250 * 1024 * 1024;

c10d::ReduceOp to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::mean:  // gloo and mpi have no average: divided afterwards
      return c10d::ReduceOp::SUM;
    case ReduceOp::min:
      return c10d::ReduceOp::MIN;
    case ReduceOp::max:
      return c10d::ReduceOp::MAX;
    case ReduceOp::product:
      return c10d::ReduceOp::PRODUCT;
  }
  return c10d::ReduceOp::SUM;
}

void check_tensor(const at::Tensor& tensor, const char* collective) {
  if (!tensor.defined())
    throw Error(std::string("comm.") + collective, "a tensor", "an undefined one");
  if (!tensor.is_contiguous()) {
    throw Error(std::string("comm.") + collective, "a contiguous tensor",
                c10::str("one of strides ", tensor.strides()), "pass tensor.contiguous()");
  }
}

c10::DeviceType device_of(const std::string& backend) {
  return backend == "nccl" ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
}

}  // namespace

struct Work::Impl {
  c10::intrusive_ptr<c10d::Work> work;  // null: done
  at::Tensor divide;                    // by divisor, once done
  int divisor = 1;
};

Work::Work(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

void Work::wait() {
  if (impl_->work == nullptr) return;
  impl_->work->wait();
  impl_->work.reset();
  if (impl_->divide.defined()) impl_->divide.div_(impl_->divisor);
}

bool Work::done() const {
  return impl_->work == nullptr || impl_->work->isCompleted();
}

Group::Group() : impl_(std::make_shared<Impl>()) {}
Group::Group(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

int Group::rank() const {
  return impl_->rank;
}
int Group::size() const {
  return impl_->size;
}
std::string_view Group::backend() const {
  return impl_->backend;
}
std::chrono::milliseconds Group::timeout() const {
  return impl_->options.timeout();
}

Work Group::all_reduce_async(at::Tensor& tensor, ReduceOp op) const {
  check_tensor(tensor, "all_reduce");
  auto work = std::make_shared<Work::Impl>();
  if (impl_->process_group != nullptr) {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> tensors{tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = to_c10d(op);
    work->work = impl_->process_group->allreduce(tensors, options);
    if (op == ReduceOp::mean) {
      work->divide = tensor;
      work->divisor = size();
    }
  }
  return Work(std::move(work));
}

void Group::all_reduce(at::Tensor& tensor, ReduceOp op) const {
  all_reduce_async(tensor, op).wait();
}

void Group::broadcast(at::Tensor& tensor, int root) const {
  check_tensor(tensor, "broadcast");
  if (impl_->process_group == nullptr) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors{tensor};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  impl_->process_group->broadcast(tensors, options)->wait();
}

void Group::broadcast(const std::vector<at::Tensor>& tensors, int root) const {
  if (impl_->process_group == nullptr || tensors.empty()) return;
  const at::NoGradGuard no_grad;
  c10d::broadcast_coalesced(impl_->process_group, tensors, kBroadcastBytes, root);
}

std::string Group::broadcast(std::string text, int root) const {
  if (impl_->process_group == nullptr) return text;
  const auto device = at::TensorOptions(device_of(impl_->backend));
  at::Tensor size = at::full({1}, static_cast<std::int64_t>(text.size()), device.dtype(at::kLong));
  broadcast(size, root);
  const auto bytes = size.item<std::int64_t>();
  at::Tensor buffer = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
  if (rank() == root && bytes > 0) std::memcpy(buffer.mutable_data_ptr(), text.data(), text.size());
  buffer = buffer.to(device.device());
  if (bytes > 0) broadcast(buffer, root);
  buffer = buffer.cpu();
  return {static_cast<const char*>(buffer.const_data_ptr()), static_cast<std::size_t>(bytes)};
}

std::vector<at::Tensor> Group::all_gather(const at::Tensor& tensor) const {
  check_tensor(tensor, "all_gather");
  if (impl_->process_group == nullptr) return {tensor.clone()};
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> inputs{tensor};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int rank = 0; rank < size(); ++rank) outputs[0].push_back(at::empty_like(tensor));
  impl_->process_group->allgather(outputs, inputs)->wait();
  return outputs[0];
}

std::vector<std::string> Group::all_gather(const std::string& text) const {
  if (impl_->process_group == nullptr) return {text};
  std::vector<std::string> texts;
  for (int root = 0; root < size(); ++root) texts.push_back(broadcast(text, root));
  return texts;
}

void Group::barrier() const {
  if (impl_->process_group != nullptr) impl_->process_group->barrier()->wait();
}

void Group::monitored_barrier(std::chrono::milliseconds timeout) const {
  if (impl_->process_group == nullptr) return;
  const std::string prefix = fmt::format("barrier/{}/", impl_->barriers++);
  const auto store = impl_->store->clone();
  store->setTimeout(timeout);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  put(*store, prefix + std::to_string(rank()), "here");
  std::vector<int> missing;
  for (int peer = 0; peer < size(); ++peer) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    try {
      store->wait({prefix + std::to_string(peer)}, std::max(left, std::chrono::milliseconds(1)));
    } catch (const std::exception&) {
      missing.push_back(peer);
    }
  }
  if (missing.empty()) return;
  std::string list;
  for (const int peer : missing) list += (list.empty() ? "" : ", ") + std::to_string(peer);
  throw CommError(
      "comm.monitored_barrier",
      fmt::format("all {} ranks within {} s", size(), static_cast<double>(timeout.count()) / 1000),
      (missing.size() == 1 ? "no rank " : "no ranks ") + list, "", missing);
}

Group Group::subgroup(const std::vector<int>& ranks) const {
  const bool ascending =
      std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) == ranks.end();
  if (ranks.empty() || !ascending || ranks.front() < 0 || ranks.back() >= size()) {
    throw Error("comm.subgroup", fmt::format("ascending ranks from 0 to {}", size() - 1),
                c10::str(ranks));
  }
  const std::string prefix = fmt::format("subgroup/{}", impl_->subgroups++);
  const auto mine = std::find(ranks.begin(), ranks.end(), rank());
  if (mine == ranks.end() || ranks.size() == 1 || impl_->process_group == nullptr) return Group();
  BackendRequest request = impl_->request;
  request.store = c10::make_intrusive<c10d::PrefixStore>(
      prefix + "/" + std::to_string(ranks.front()), impl_->store);
  request.rank = static_cast<int>(mine - ranks.begin());
  request.size = static_cast<int>(ranks.size());
  return Group(make_group(request, impl_->backend, impl_->options, impl_->watch));
}

Group Group::split(int size) const {
  if (size < 1 || this->size() % size != 0) {
    throw Error("comm.split", fmt::format("a size that divides the group's {}", this->size()),
                std::to_string(size));
  }
  // One number for all groups of this call; the first rank in the key tells them apart.
  const int first = rank() / size * size;
  std::vector<int> ranks;
  for (int peer = first; peer < first + size; ++peer) ranks.push_back(peer);
  return subgroup(ranks);
}

std::shared_ptr<Group::Impl> make_group(const BackendRequest& request, const std::string& backend,
                                        const InitOptions& options, std::shared_ptr<Watch> watch) {
  auto impl = std::make_shared<Group::Impl>();
  impl->rank = request.rank;
  impl->size = request.size;
  impl->backend = backend;
  impl->options = options;
  impl->request = request;
  impl->store = request.store;
  impl->watch = std::move(watch);

  BackendRequest transport = request;
  transport.store = c10::make_intrusive<c10d::PrefixStore>("transport", request.store);
  const bool nccl = backend == "nccl";
  const auto inner = nccl               ? make_nccl(transport)
                     : backend == "mpi" ? make_mpi(transport)
                                        : make_gloo(transport);
  const auto watched = make_watched(inner, impl->watch,
                                    c10::make_intrusive<c10d::PrefixStore>("calls", request.store),
                                    options.check().value_or(CheckLevel::none));
  using Type = c10d::ProcessGroup::BackendType;
  const Type type = nccl ? Type::NCCL : backend == "mpi" ? Type::MPI : Type::GLOO;
  impl->process_group =
      c10::make_intrusive<c10d::ProcessGroup>(request.store, request.rank, request.size);
  impl->process_group->setBackend(device_of(backend), type, watched);
  impl->process_group->setDefaultBackend(type);
  return impl;
}

}  // namespace semitone::comm
