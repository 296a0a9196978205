#pragma once

#include "semitone/comm/group.h"
#include "semitone/parallel/detail/replica_sync.h"
#include "semitone/parallel/distributed_data_parallel_options.h"
#include "semitone/parallel/gradient_order.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace semitone::parallel::detail {

// The divisor of gradient sums: the number of ranks, or of those that still have input.
using Divisor = std::function<std::int64_t()>;

// The way in which DistributedDataParallel averages gradients over the ranks in backward passes.
class Reduction {
 public:
  Reduction() = default;
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;
  virtual ~Reduction() = default;

  // The order in which gradients are summed, if it is known and not the same in every run.
  virtual std::optional<GradientOrder> order() const { return std::nullopt; }
  // Sets the order of all steps, before the first one. Error on all ranks if it is too late, does not
  // fit, or is not the same everywhere. Collective.
  virtual void set_order(const std::optional<GradientOrder>&) {}

  // Call before a forward whose gradients will be reduced.
  virtual void before_forward() {}
  // Call after a forward whose gradients stay on this rank, even if gradients of an earlier forward
  // were to be reduced and never arrived.
  virtual void expect_local_gradients() {}
  // The sum over the ranks of 1 for each with input, in progress or done: the divisor from now on.
  // Null: the number of ranks.
  virtual void divide_by(const c10::intrusive_ptr<c10d::Work>&) {}
  // Call after it.
  // @param outputs  its results, if the reduction needs them
  virtual void before_backward(const std::vector<at::Tensor>& outputs) = 0;
  // The first gradient of a backward pass arrives. Called in backward, before its on_gradient.
  virtual void begin_backward() {}
  // A gradient for a parameter arrives. Error if the search for unused parameters has missed it.
  // Called in backward.
  // @param index  of ModelTensors::parameters
  virtual void require_found(std::size_t /*index*/) {}
  // A parameter has its gradient. Called in backward.
  // @param index  of ModelTensors::parameters
  virtual void on_gradient(std::size_t /*index*/) {}
  // Whether everything that before_backward announced is done. Called at the end of a backward
  // pass.
  virtual bool finished() = 0;
  // Forgets a backward pass that an exception ended. False if that is impossible, because part of
  // its gradients have been sent.
  virtual bool forget_backward() = 0;

  // Whether before_backward, and then on_outputs_gradient, need the results.
  virtual bool wants_outputs() const { return false; }
  // Called in backward when it reaches the results of forward.
  virtual void on_outputs_gradient() {}

  // The communication of a step except buffers, with zeros: for a rank without input.
  // @param keep  whether the parameters get the gradients
  virtual void shadow(bool keep) = 0;
};

// c10d's Reducer: sends buckets while backward is running.
std::unique_ptr<Reduction> make_bucketed_reduction(const ModelTensors& model,
                                                   const comm::Group& group,
                                                   const DistributedDataParallelOptions& options,
                                                   const Divisor& divisor);

// Sends everything at the end of backward.
std::unique_ptr<Reduction> make_delayed_reduction(const ModelTensors& model,
                                                  const comm::Group& group,
                                                  const DistributedDataParallelOptions& options,
                                                  const Divisor& divisor);

}  // namespace semitone::parallel::detail
