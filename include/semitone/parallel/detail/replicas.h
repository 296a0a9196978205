#pragma once

#include "semitone/core/map_tensors.h"
#include "semitone/parallel/detail/replica_sync.h"

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
}

namespace semitone::parallel::detail {

/// The settings of a DataParallel: its devices, and the dimension along which it splits batches.
/// The comment on DataParallel documents contracts and errors.
struct ReplicaPlan {
  ReplicaPlan(const ModelTensors& model, const DataParallelOptions& options);

  std::vector<c10::Device> devices;  ///< of the replicas, at least one; the first is the model's
  c10::Device output_device;
  std::int64_t dim;  ///< along which batches are split: the batch dimension
};

/// Splits a batch into one part per replica, as torch::chunk does.
class BatchCut {
 public:
  explicit BatchCut(const ReplicaPlan& plan) : plan_(&plan) {}

  /// Reads the extent of the batch dimension. Call it with every tensor of the batch before parts()
  /// and part(). Error if the extents of two tensors differ; tensors without dimensions do not
  /// count.
  void look_at(const at::Tensor& tensor);

  /// Returns the number of parts, which is the number of replicas that the batch needs. It is at
  /// least 1, and otherwise at most the extent of the batch dimension.
  std::size_t parts() const;

  /// Returns one replica's part of a tensor, on its device. A tensor without dimensions goes to
  /// every replica.
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

/// Concatenates the results of all replicas on the output device, along the batch dimension.
/// Tensors without dimensions are stacked.
/// @param results  results[replica][i] is tensor i of a replica's result
/// @return         one tensor for each i
std::vector<at::Tensor> gather(const ReplicaPlan& plan,
                               const std::vector<std::vector<at::Tensor>>& results);

/// The same for results of any type that map_tensors supports. Everything but the tensors is copied
/// from the first replica's result.
template <typename Output>
Output gather(const ReplicaPlan& plan, std::vector<Output> outputs) {
  static_assert(semitone::detail::HoldsTensors<Output>::value,
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

}  // namespace semitone::parallel::detail
