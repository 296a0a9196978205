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

/// What DataParallel does besides calling the model: for a forward of any shape. See there for
/// contracts and errors.
struct ReplicaPlan {
  ReplicaPlan(const ModelTensors& model, const DataParallelOptions& options);

  std::vector<c10::Device> devices;  ///< of the replicas, at least one; the first is the model's
  c10::Device output_device;
  std::int64_t dim;  ///< along which batches are cut
};

/// How a batch is cut into one part for each replica: as torch::chunk cuts.
class BatchCut {
 public:
  explicit BatchCut(const ReplicaPlan& plan) : plan_(&plan) {}

  /// Every tensor of the batch, first: all that have dimensions have to have the same extent.
  void look_at(const at::Tensor& tensor);

  /// How many parts there are, and replicas needed: no more than there are rows.
  std::size_t parts() const;

  /// The share of one replica, on its device. A tensor without dimensions is everybody's.
  at::Tensor part(const at::Tensor& tensor, std::size_t replica) const;

 private:
  std::int64_t rows_of_a_part() const;

  const ReplicaPlan* plan_;
  std::optional<std::int64_t> rows_;
};

/// Copies of a model, a std::shared_ptr to a module or a torch::jit::Module each.
template <typename Copy>
struct Replicas {
  std::vector<Copy> copies;  ///< replicas 1, 2 …; replica 0 is the model
  std::shared_ptr<const ReplicaParameters> parameters;  ///< whose copies theirs are
};

/// Makes replicas 1 … count - 1. In grad mode their parameters are results of the model's: their
/// gradients go back to those, added up in the order of the replicas.
Replicas<std::shared_ptr<torch::nn::Module>> replicate(const torch::nn::Module& model,
                                                       const ReplicaPlan& plan, std::size_t count);
Replicas<torch::jit::Module> replicate(const torch::jit::Module& model, const ReplicaPlan& plan,
                                       std::size_t count);

/// Calls work(replica) for replicas 0 … count - 1, each on a thread of its own with the caller's
/// thread state, and waits for all.
void run_replicas(const ReplicaPlan& plan, std::size_t count,
                  const std::shared_ptr<const ReplicaParameters>& parameters,
                  c10::function_ref<void(std::size_t)> work);

/// The tensors of all replicas' results (by replica, then by place) as one result's.
std::vector<at::Tensor> gather(const ReplicaPlan& plan,
                               const std::vector<std::vector<at::Tensor>>& results);

/// The same for whole results, in the form of the first.
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
