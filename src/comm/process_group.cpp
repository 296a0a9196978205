#include "src/comm/process_group.h"

#include "semitone/core/error.h"
#include "src/comm/backends.h"
#include "src/core/libtorch_release.h"

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/types.h>

#include <fmt/format.h>

#include <cstddef>
#include <exception>
#include <string>
#include <utility>

namespace semitone::comm {
namespace {

// Coalesced broadcasts use buffers of this size, as torch's DistributedDataParallel does for a
// model.
constexpr std::size_t kBroadcastBytes = 250 * 1024 * 1024;

}  // namespace

bool is_reducible(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
    case at::kFloat:
    case at::kHalf:
    case at::kBFloat16:
    case at::kLong:
    case at::kInt:
    case at::kChar:
    case at::kByte:
      return true;
    default:
      return false;
  }
}

bool can_add_up(const Group& group, at::ScalarType dtype) {
  if (group.size() == 1 || !group.device().is_cpu()) return true;
#if SEMITONE_LIBTORCH_SINCE(2, 11)
  dtype = c10::toRealValueType(dtype);  // Gloo adds complex numbers as pairs
#endif
  return is_reducible(dtype);
}

at::Tensor transportable(const at::Tensor& tensor) {
  if (is_reducible(tensor.scalar_type())) return tensor.detach();
  return tensor.detach().view({-1}).view(at::kByte);
}

void broadcast_unchecked(const Group& group, const std::vector<at::Tensor>& tensors, int root) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sent;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // of what no transport takes as it lies
  for (const at::Tensor& tensor : tensors) {
    if (is_reducible(tensor.scalar_type())) {
      sent.push_back(tensor.detach());
    } else {
      const at::Tensor memory = tensor.detach().contiguous();
      sent.push_back(transportable(memory));
      if (!memory.is_alias_of(tensor)) copies.emplace_back(tensor.detach(), memory);
    }
  }
  c10d::broadcast_coalesced(process_group(group), sent, kBroadcastBytes, root);
  for (const auto& [tensor, memory] : copies) tensor.copy_(memory);
}

std::vector<at::Tensor> all_gather_unchecked(const Group& group, const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> inputs{transportable(tensor)};
  std::vector<at::Tensor> gathered;
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int rank = 0; rank < group.size(); ++rank) {
    gathered.push_back(at::empty_like(tensor));
    outputs[0].push_back(transportable(gathered.back()));
  }
  process_group(group)->allgather(outputs, inputs)->wait();
  return gathered;
}

void all_reduce_unchecked(const Group& group, at::Tensor& sums) {
  group.all_reduce_async(sums).wait();
}

void announce(const Group& group, const std::string& call, const std::string& arguments) {
  if (group.impl()->process_group != nullptr) group.impl()->transport->announce(call, arguments);
}

void wait_for_all(const Group::Impl& group) {
  group.transport->barrier(c10d::BarrierOptions())->wait();
}

void connect(Group::Impl& group) {
  BackendRequest request;
  request.store = c10::make_intrusive<c10d::PrefixStore>("transport", group.store);
  request.rank = group.rank;
  request.size = group.size;
  request.timeout = group.options.timeout();
  request.address = group.address;
  request.device = group.device;
  const Backend& backend = *find_backend(group.backend);
  Transport transport;
  try {
    transport = backend.make(request, *group.watch);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    std::rethrow_exception(group.watch->explain("init", error.what(), false));
  }

  WatchedBackendOptions options;
  options.watch = group.watch;
  options.device = group.device;
  options.check = group.options.check().value_or(CheckLevel::none);
  options.timeout = group.options.timeout();
  options.members = group.members;
  options.counts_calls = group.is_of_all;
  options.is_queued = transport.is_queued;
  options.enter_thread = transport.enter_thread;
  group.transport = c10::make_intrusive<WatchedBackend>(std::move(transport.backend), options);
  group.process_group =
      c10::make_intrusive<c10d::ProcessGroup>(group.store, group.rank, group.size);
  group.process_group->setBackend(group.device.type(), backend.type, group.transport);
  group.process_group->setDefaultBackend(backend.type);
  // No rank continues, or leaves, before all are connected.
  wait_for_all(group);
}

}  // namespace semitone::comm
