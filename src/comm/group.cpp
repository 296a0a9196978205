#include "semitone/comm/group.h"

#include "semitone/core/error.h"
#include "src/comm/checks.h"
#include "src/comm/durations.h"
#include "src/comm/process_group.h"
#include "src/comm/ranks.h"
#include "src/comm/watched_backend.h"
#include "src/core/exact_weights.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/types.h>

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace semitone::comm {
namespace {

std::string call_of(const std::vector<at::Tensor>& tensors, int root) {
  return fmt::format("{} from rank {}", tensors.empty() ? "no tensors" : describe(tensors), root);
}

}  // namespace

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
c10::Device Group::device() const {
  return impl_->device;
}
std::chrono::milliseconds Group::timeout() const {
  return impl_->options.timeout();
}

void Group::all_reduce(at::Tensor& tensor, ReduceOp op) const {
  check_reducible(*this, tensor, "all_reduce", op);
  announce(*this, "all_reduce", describe({tensor}));
  all_reduce_async(tensor, op).wait();
}

void Group::broadcast(at::Tensor& tensor, int root) const {
  check_tensor(*this, tensor, "broadcast");
  check_root(root, size(), "broadcast");
  announce(*this, "broadcast", call_of({tensor}, root));
  broadcast_async(tensor, root).wait();
}

void Group::broadcast(const std::vector<at::Tensor>& tensors, int root) const {
  for (const at::Tensor& tensor : tensors) check_dense(*this, tensor, "broadcast");
  check_root(root, size(), "broadcast");
  if (impl_->process_group == nullptr) return;
  announce(*this, "broadcast", call_of(tensors, root));
  if (tensors.empty()) return;
  broadcast_unchecked(*this, tensors, root);
  for (const at::Tensor& tensor : tensors) settle_exact_weight(tensor);
}

std::vector<at::Tensor> Group::all_gather(const at::Tensor& tensor) const {
  check_tensor(*this, tensor, "all_gather");
  if (impl_->process_group == nullptr) return {tensor.detach().clone()};
  announce(*this, "all_gather", describe({tensor}));
  return all_gather_unchecked(*this, tensor);
}

at::Tensor Group::reduce_scatter(const at::Tensor& tensor, ReduceOp op) const {
  check_reducible(*this, tensor, "reduce_scatter", op);
  check_divisible(*this, tensor, "reduce_scatter");
  announce(*this, "reduce_scatter", describe({tensor}));
  at::Tensor part = at::empty(part_sizes(*this, tensor), tensor.options());
  reduce_scatter_async(part, tensor, op).wait();
  return part;
}

void Group::barrier() const {
  if (impl_->process_group == nullptr) return;
  announce(*this, "barrier", "");
  wait_for_all(*impl_);
}

namespace {

// @param name  new for each use
void wait_for_members(const Group::Impl& group, const std::string& name,
                      std::chrono::milliseconds timeout, const char* caller) {
  const auto missing = group.watch->barrier(name, group.members, timeout, caller);
  if (missing.empty()) return;
  throw CommError(std::string("comm.") + caller,
                  fmt::format("all {} ranks within {}", group.size,
                              seconds(std::chrono::duration<double>(timeout).count())),
                  "no sign of " + name_ranks(missing), "check these ranks", missing);
}

}  // namespace

void Group::monitored_barrier(std::chrono::milliseconds given) const {
  if (impl_->process_group == nullptr) return;
  const auto timeout = std::max(limited(given), std::chrono::milliseconds(0));
  const std::string name = fmt::format("{} {}", impl_->name, impl_->barriers++);
  wait_for_members(*impl_, name, timeout, "monitored_barrier");
}

namespace {

Group make_subgroup(Group::Impl& from, const std::vector<int>& ranks, const std::string& backend,
                    c10::Device device) {
  // One number for all groups of a split; the first rank in the name distinguishes them.
  const std::string name = fmt::format("{}-{}", from.subgroups++, ranks.front());
  const auto mine = std::find(ranks.begin(), ranks.end(), from.rank);
  if (mine == ranks.end() || ranks.size() == 1 || from.process_group == nullptr) {
    auto alone = std::make_shared<Group::Impl>();
    alone->device = device;
    alone->options = from.options;
    alone->members = {from.members[static_cast<std::size_t>(from.rank)]};
    return Group(std::move(alone));
  }
  auto impl = std::make_shared<Group::Impl>(from);
  impl->rank = static_cast<int>(mine - ranks.begin());
  impl->size = static_cast<int>(ranks.size());
  impl->backend = backend;
  impl->device = device;
  impl->name = from.name + "/" + name;
  impl->store = c10::make_intrusive<c10d::PrefixStore>(name, from.store);
  impl->members.clear();
  for (const int member : ranks)
    impl->members.push_back(from.members[static_cast<std::size_t>(member)]);
  impl->is_of_all = false;
  impl->subgroups = impl->barriers = 0;
  impl->transport.reset();
  impl->process_group.reset();
  // The transport, which connects the ranks, waits for a minute only.
  wait_for_members(*impl, impl->name + " is made", impl->options.timeout(), "subgroup");
  connect(*impl);
  return Group(std::move(impl));
}

}  // namespace

Group group_of_cpus(const Group& group) {
  std::vector<int> ranks(static_cast<std::size_t>(group.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return make_subgroup(*group.impl(), ranks, "gloo", c10::kCPU);
}

Group Group::subgroup(const std::vector<int>& ranks) const {
  const bool ascending =
      std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) == ranks.end();
  if (ranks.empty() || !ascending || ranks.front() < 0 || ranks.back() >= size()) {
    throw Error("comm.subgroup", fmt::format("ascending ranks from 0 to {}", size() - 1),
                c10::str(ranks));
  }
  return make_subgroup(*impl_, ranks, impl_->backend, impl_->device);
}

Group Group::split(int size) const {
  if (size < 1 || this->size() % size != 0) {
    throw Error("comm.split", fmt::format("a size that divides the group's {}", this->size()),
                std::to_string(size));
  }
  const int first = rank() / size * size;
  std::vector<int> ranks;
  for (int peer = first; peer < first + size; ++peer) ranks.push_back(peer);
  return subgroup(ranks);
}

}  // namespace semitone::comm
