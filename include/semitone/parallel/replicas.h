#pragma once

#include "semitone/core/map_tensors.h"
#include "semitone/parallel/replica_sync.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace semitone {
struct ReplicaParameters;
}

namespace semitone::parallel {

class DataParallelOptions;

/// The settings of a DataParallel: its devices and the dimension of the batch. See there for
/// contracts and errors.
struct ReplicaPlan {
  ReplicaPlan(const ModelTensors& model, const DataParallelOptions& options);

  std::vector<c10::Device> devices;  ///< of the replicas, at least one; the first is the model's
  c10::Device output_device;
  std::int64_t dim;  ///< along which batches are split
};

/// Splits a batch into one part per replica, as torch::chunk does.
class BatchCut {
 public:
  explicit BatchCut(const ReplicaPlan& plan) : plan_(&plan) {}

  /// Call with every tensor of the batch first. All that have dimensions must have the same extent.
  void look_at(const at::Tensor& tensor);

  /// The number of parts, and of replicas needed: no more than there are rows.
  std::size_t parts() const;

  /// The share of one replica, on its device. A tensor without dimensions goes to every replica.
  at::Tensor part(const at::Tensor& tensor, std::size_t replica) const;

 private:
  std::int64_t rows_of_a_part() const;

  const ReplicaPlan* plan_;
  std::optional<std::int64_t> rows_;
};

/// Copies of a model: each is a std::shared_ptr to a module, or a torch::jit::Module.
template <typename Copy>
struct Replicas {
  std::vector<Copy> copies;                             ///< replicas 1, 2 …; replica 0 is the model
  std::shared_ptr<const ReplicaParameters> parameters;  ///< the originals of the copies' parameters
};

/// Makes replicas 1 … count - 1. In grad mode autograd records the copies of the parameters, so
/// that their gradients flow back to the model's parameters, summed in the order of the replicas.
Replicas<std::shared_ptr<torch::nn::Module>> replicate(const torch::nn::Module& model,
                                                       const ReplicaPlan& plan, std::size_t count);
Replicas<torch::jit::Module> replicate(const torch::jit::Module& model, const ReplicaPlan& plan,
                                       std::size_t count);

/// Calls work(replica) for replicas 0 … count - 1, each on its own thread with the caller's thread
/// state, and waits for all.
void run_replicas(const ReplicaPlan& plan, std::size_t count,
                  const std::shared_ptr<const ReplicaParameters>& parameters,
                  c10::function_ref<void(std::size_t)> work);

/// Combines the tensors of all replicas' results (by replica, then by place) into those of one
/// result.
std::vector<at::Tensor> gather(const ReplicaPlan& plan,
                               const std::vector<std::vector<at::Tensor>>& results);

/// The same for whole results, in the structure of the first.
template <typename Output>
Output gather(const ReplicaPlan& plan, std::vector<Output> outputs) {
  static_assert(detail::HoldsTensors<Output>::value,
                "DataParallel can put together tensors, in containers and IValues: a type of your "
                "own needs a method map_tensors, see core/map_tensors.h");
  std::vector<std::vector<at::Tensor>> results(outputs.size());
  for (std::size_t replica = 0; replica < outputs.size(); ++replica) {
    const auto collect = [&](const at::Tensor& tensor) {
      results[replica].push_back(tensor);
      return tensor;
    };
    static_cast<void>(map_tensors(outputs[replica], collect));
  }
  const std::vector<at::Tensor> gathered = gather(plan, results);
  auto next = gathered.begin();
  const auto replace = [&](const at::Tensor&) { return *next++; };
  return map_tensors(outputs.front(), replace);
}

}  // namespace semitone::parallel
