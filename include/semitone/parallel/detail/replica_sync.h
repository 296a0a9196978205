#pragma once

#include "semitone/comm/group.h"
#include "semitone/core/map_tensors.h"
#include "semitone/parallel/distributed_data_parallel_options.h"
#include "semitone/parallel/gradient_order.h"
#include "semitone/parallel/no_sync.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace semitone::parallel::detail {

/// A model's parameters and buffers, each once.
struct ModelTensors {
  struct Entry {
    std::string name;  ///< "layer1.conv.weight"
    at::Tensor tensor;
    bool sparse_gradient = false;  ///< the weight of an Embedding with sparse(true)
  };
  std::vector<Entry> parameters;
  std::vector<Entry> buffers;
  /// Returns the current parameters, for a model whose layers may change. May be empty.
  std::function<std::vector<Entry>()> current_parameters;
  /// The buffers as they are now, for a model whose forward may put other tensors in their places:
  /// `self.mean = …` in TorchScript. Empty for others.
  std::function<std::vector<Entry>()> current_buffers;
};
ModelTensors tensors_of(const torch::nn::Module& model);
ModelTensors tensors_of(const torch::jit::Module& model);

/// The part of DistributedDataParallel that does not depend on the signature of forward. The
/// comment on DistributedDataParallel documents contracts and errors.
class ReplicaSync {
 public:
  ReplicaSync(ModelTensors model, comm::Group group, const DistributedDataParallelOptions& options);
  ReplicaSync(ReplicaSync&&) noexcept;
  ReplicaSync& operator=(ReplicaSync&&) noexcept;
  ~ReplicaSync();

  const comm::Group& group() const;

  std::optional<GradientOrder> gradient_order() const;
  void set_gradient_order(const std::optional<GradientOrder>& order);

  /// Call before the model's forward.
  void before_forward();

  /// Call after the model's forward, which may have registered layers. Error if the model has a
  /// parameter that it did not have at construction.
  void require_no_new_parameters(const torch::nn::Module& model) const;
  void require_no_new_parameters(const torch::jit::Module& model) const;

  /// Call after the model's forward. Returns the results that replace the model's.
  template <typename Output>
  Output after_forward(Output output) {
    if (!wants_outputs()) {
      expect_backward({});
      return output;
    }
    if constexpr (semitone::detail::HoldsTensors<Output>::value) {
      std::vector<at::Tensor> tensors;
      const auto collect = [&](const at::Tensor& tensor) {
        tensors.push_back(tensor);
        return tensor;
      };
      static_cast<void>(map_tensors(output, collect));
      tensors = expect_backward(tensors);
      auto next = tensors.begin();
      const auto replace = [&](const at::Tensor&) { return *next++; };
      return map_tensors(std::move(output), replace);
    } else {
      refuse_outputs();
      return output;
    }
  }
  /// Call after a forward that returns void.
  void after_forward() {
    if (must_search_outputs()) refuse_void();
    expect_backward({});
  }

  NoSync no_sync();
  void join(const std::function<void()>& loop, const JoinOptions& options);

 private:
  bool wants_outputs() const;
  bool must_search_outputs() const;
  [[noreturn]] static void refuse_outputs();
  [[noreturn]] static void refuse_void();
  std::vector<at::Tensor> expect_backward(const std::vector<at::Tensor>& outputs);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace semitone::parallel::detail
