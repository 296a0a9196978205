#include "semitone/parallel/detail/replicas.h"

#include "semitone/core/error.h"
#include "semitone/parallel/data_parallel.h"
#include "src/core/log.h"
#include "src/core/replica_parameters.h"
#include "src/parallel/gpu_balance.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/types.h>

#include <dlfcn.h>

#include <algorithm>
#include <exception>
#include <string>
#include <thread>

namespace semitone::parallel::detail {
namespace {

constexpr auto kReplicas = "parallel.data_parallel";

c10::Device device_of(const ModelTensors& model) {
  for (const auto* entries : {&model.parameters, &model.buffers}) {
    if (!entries->empty()) return entries->front().tensor.device();
  }
  return at::kCPU;
}

// With an index if devices of the type have numbers, without on a CPU, so that equal devices
// compare equal.
c10::Device numbered(c10::Device device) {
  if (device.is_cpu()) return at::kCPU;
  if (device.has_index()) return device;
  return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

void require_present(c10::Device device) {
  if (device.is_cpu()) return;
  const int count = c10::impl::hasDeviceGuardImpl(device.type())
                        ? c10::impl::VirtualGuardImpl(device.type()).deviceCount()
                        : 0;
  if (device.index() < count && count > 0) return;
  throw Error(kReplicas, "devices that this machine has", device.str(),
              c10::str("there are ", count, " of this type"));
}

std::vector<c10::Device> all_like(c10::Device first) {
  std::vector<c10::Device> devices{first};
  if (first.is_cpu()) return devices;
  const c10::DeviceIndex count = c10::impl::VirtualGuardImpl(first.type()).deviceCount();
  for (c10::DeviceIndex index = 0; index < count; ++index) {
    if (index != first.index()) devices.emplace_back(first.type(), index);
  }
  return devices;
}

// Sets the number of intra-op threads of the calling thread only. at::set_num_threads sets the
// initial number of all threads of the process, and recreates a thread pool.
void limit_threads(int threads) {
  at::get_num_threads();  // a thread gets the process's number when it first asks: not after this
  for (const char* setter : {"omp_set_num_threads", "MKL_Set_Num_Threads_Local"}) {
    // The functions of the OpenMP that LibTorch has loaded: it comes with its own.
    if (auto* const set = ::dlsym(RTLD_DEFAULT, setter))
      reinterpret_cast<void (*)(int)>(set)(threads);
  }
}

[[noreturn]] void rethrow(const std::exception_ptr& error, std::size_t replica,
                          c10::Device device) {
  const std::string place = c10::str("in replica ", replica, " on ", device);
  try {
    std::rethrow_exception(error);
  } catch (c10::Error& from_torch) {
    from_torch.add_context(place);
    throw;
  } catch (const std::exception& other) {
    std::throw_with_nested(
        Error(kReplicas, "a forward without an exception", place + ": " + other.what()));
  }
}

at::Tensor join(const ReplicaPlan& plan, const std::vector<at::Tensor>& parts) {
  const auto defined = std::count_if(parts.begin(), parts.end(),
                                     [](const at::Tensor& part) { return part.defined(); });
  if (defined == 0) return {};
  if (defined != std::ssize(parts)) {
    throw Error(kReplicas, "the same results from every replica",
                "a tensor that some leave undefined");
  }
  std::vector<at::Tensor> moved;
  moved.reserve(parts.size());
  for (const at::Tensor& part : parts) moved.push_back(part.to(plan.output_device));
  return moved.front().dim() == 0 ? at::stack(moved) : at::cat(moved, plan.dim);
}

}  // namespace

ReplicaPlan::ReplicaPlan(const ModelTensors& model, const DataParallelOptions& options)
    : output_device(at::kCPU), dim(options.dim()) {
  const c10::Device first = device_of(model);
  if (options.replicas().has_value()) {
    if (!options.device_ids().empty()) throw Error(kReplicas, "device_ids or replicas", "both");
    const int count = *options.replicas();
    if (count < 1) throw Error(kReplicas, "at least one replica", std::to_string(count));
    devices.assign(static_cast<std::size_t>(count), first);
  } else if (options.device_ids().empty()) {
    devices = all_like(first);
  } else {
    for (const c10::Device device : options.device_ids()) {
      if (device.type() != first.type()) {
        throw Error(kReplicas, c10::str("devices of the model's type, ", first.type()),
                    device.str());
      }
      devices.push_back(numbered(device));
      require_present(devices.back());
    }
    if (devices.front() != first) {
      throw Error(kReplicas, c10::str("the model on the first device, ", devices.front()),
                  first.str(), c10::str("move it there: model->to(\"", devices.front(), "\")"));
    }
  }
  output_device = numbered(options.output_device().value_or(first));
  require_present(output_device);
  if (dim < 0) throw Error(kReplicas, "a dim of 0 or more", std::to_string(dim));
  if (const std::string imbalance = imbalance_of(devices); !imbalance.empty())
    log()->warn("{}", imbalance);
}

void BatchCut::look_at(const at::Tensor& tensor) {
  if (plan_->devices.size() == 1 || !tensor.defined() || tensor.dim() == 0) return;
  if (tensor.dim() <= plan_->dim) {
    throw Error(kReplicas, c10::str("tensors with a dimension ", plan_->dim, " to split along"),
                c10::str("one of shape ", tensor.sizes()));
  }
  const std::int64_t rows = tensor.size(plan_->dim);
  if (rows_.value_or(rows) != rows) {
    throw Error(kReplicas, c10::str("the same extent of all tensors in dimension ", plan_->dim),
                c10::str(*rows_, " and ", rows),
                "expand() tensors that apply to all rows, or make them members of the model");
  }
  rows_ = rows;
}

std::int64_t BatchCut::rows_of_a_part() const {
  const auto replicas = static_cast<std::int64_t>(plan_->devices.size());
  return std::max<std::int64_t>((*rows_ + replicas - 1) / replicas, 1);
}

std::size_t BatchCut::parts() const {
  if (plan_->devices.size() == 1) return 1;
  if (!rows_.has_value()) {
    throw Error(kReplicas, "a tensor with dimensions to split among the arguments", "none",
                "a type of your own needs a method map_tensors: see core/map_tensors.h");
  }
  const std::int64_t size = rows_of_a_part();
  return static_cast<std::size_t>(std::max<std::int64_t>((*rows_ + size - 1) / size, 1));
}

at::Tensor BatchCut::part(const at::Tensor& tensor, std::size_t replica) const {
  if (!tensor.defined()) return tensor;
  const bool whole = tensor.dim() == 0 || plan_->devices.size() == 1;
  at::Tensor share = tensor;
  if (!whole) {
    const std::int64_t size = rows_of_a_part();
    const std::int64_t begin = size * static_cast<std::int64_t>(replica);
    share = tensor.narrow(plan_->dim, begin, std::min(size, *rows_ - begin));
  }
  return share.to(plan_->devices[replica], /*non_blocking=*/true);
}

void run_replicas(const ReplicaPlan& plan, std::size_t count,
                  const std::shared_ptr<const ReplicaParameters>& parameters,
                  c10::function_ref<void(std::size_t)> work) {
  const at::ThreadLocalState callers;
  const int threads = std::max(1, at::get_num_threads() / static_cast<int>(count));
  const auto known = std::const_pointer_cast<ReplicaParameters>(parameters);  // nobody writes to it
  std::vector<std::exception_ptr> errors(count);
  const auto run = [&](std::size_t replica, c10::Stream stream) {
    try {
      const at::ThreadLocalStateGuard state(callers);
      const c10::DebugInfoGuard originals(kReplicaState, known);
      const c10::StreamGuard on_device(stream);
      if (stream.device().is_cpu()) limit_threads(threads);
      work(replica);
    } catch (...) {
      errors[replica] = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> running;
    for (std::size_t replica = 0; replica < count; ++replica) {
      const c10::Device device = plan.devices[replica];
      const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
      running.emplace_back(run, replica, stream);
    }
  }
  for (std::size_t replica = 0; replica < count; ++replica) {
    if (errors[replica] != nullptr) rethrow(errors[replica], replica, plan.devices[replica]);
  }
}

std::vector<at::Tensor> gather(const ReplicaPlan& plan,
                               const std::vector<std::vector<at::Tensor>>& results) {
  std::vector<at::Tensor> gathered;
  for (std::size_t place = 0; place < results.front().size(); ++place) {
    std::vector<at::Tensor> parts;
    for (const auto& result : results) {
      if (result.size() != results.front().size()) {
        throw Error(kReplicas, "the same results from every replica",
                    c10::str(results.front().size(), " tensors and ", result.size()));
      }
      parts.push_back(result[place]);
    }
    gathered.push_back(join(plan, parts));
  }
  return gathered;
}

}  // namespace semitone::parallel::detail
