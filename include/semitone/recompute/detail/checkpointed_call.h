#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <vector>

namespace semitone::nn::detail {

/// What nn::checkpoint does apart from calling the function. Constructed before the first call, whose
/// regions and random numbers it notes.
class CheckpointedCall {
 public:
  using Tensors = std::vector<at::Tensor>;
  /// Runs the function with these tensors as its inputs.
  using Run = std::function<Tensors(const Tensors&)>;

  /// Whether gradients are recorded. Without, and with forward-mode derivatives of an input, which a
  /// graph that is dropped would lose, the function is called as it is.
  static bool is_needed(const Tensors& inputs);

  /// What the function reads or changes besides its inputs.
  struct State {
    bool preserve_rng_state;
    Tensors buffers;
    std::shared_ptr<torch::nn::Module> module;  ///< the function, or null
  };

  CheckpointedCall(Tensors inputs, const State& state);
  CheckpointedCall(const CheckpointedCall&) = delete;
  CheckpointedCall& operator=(const CheckpointedCall&) = delete;
  ~CheckpointedCall();

  /// The tensors to call the function with.
  const Tensors& inputs() const;

  /// Drops the graph of the outputs, and returns tensors with the same values whose backward pass
  /// calls run.
  Tensors finish(const Tensors& outputs, Run run) &&;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace semitone::nn::detail
