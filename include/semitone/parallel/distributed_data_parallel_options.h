#pragma once

#include "semitone/parallel/comm_hook.h"

#include <c10/core/ScalarType.h>
#include <torch/arg.h>

#include <functional>
#include <memory>
#include <optional>

namespace semitone::parallel {

/// Options of DistributedDataParallel, with chained setters. They must be equal on every rank. The
/// setters of sizes and of the factor throw Error unless the value is finite and above 0.
class DistributedDataParallelOptions {
 public:
  /// Approximate size in MiB of the buckets in which gradients are sent. Small buckets can be sent
  /// while backward still computes other gradients; large buckets need fewer messages. Default 25.
  DistributedDataParallelOptions& bucket_cap_mb(double value);
  /// Size in MiB of the first bucket, which holds the gradients nearest to the loss. A small one is
  /// sent early. Default 1.
  DistributedDataParallelOptions& first_bucket_mb(double value);
  /// Sets buffers (running statistics) to rank 0's before the first forward in grad mode, and
  /// before each one that follows a backward pass, except inside no_sync. Default true.
  DistributedDataParallelOptions& broadcast_buffers(bool value);
  /// Allows parameters without a gradient in some steps. Each step searches the graph from
  /// forward's results, and gradients of parameters that no rank used are not changed. This costs
  /// the search and a copy of the results. Error in forward if it returns no tensors (void, a class
  /// without map_tensors), and in backward if the loss also has terms of parameters that take no
  /// part in the results, such as a penalty. Default false.
  DistributedDataParallelOptions& find_unused_parameters(bool value);
  /// Promises that every step uses the same parameters, the same number of times. The first step
  /// records them. Allows unused parameters without a search, and activation checkpointing. Error in
  /// the first step if a parameter with sparse gradients is unused. Default false.
  DistributedDataParallelOptions& static_graph(bool value);
  /// Makes gradients views into the buckets, which saves their memory and a copy. If a gradient is
  /// replaced by another tensor, the next step copies that into the bucket. Default false.
  DistributedDataParallelOptions& gradient_as_bucket_view(bool value);
  /// Reduces all gradients when backward is done, in one message per dtype and device: no overlap
  /// with backward. With it no other option is needed for unused parameters, several backward passes
  /// or graphs that change, and the model's own forward may be called instead of ddp.forward().
  /// Excludes find_unused_parameters, static_graph, gradient_as_bucket_view, comm_hook and sparse
  /// gradients. Default false.
  DistributedDataParallelOptions& delay_allreduce(bool value);
  /// Divides gradients by this factor before they are summed over the ranks, and by world size /
  /// factor afterwards, against overflow or underflow of 16-bit sums. Default: the world size; with
  /// compress its square root.
  DistributedDataParallelOptions& gradient_predivide_factor(double value);
  /// Converts 16-bit gradients to fp32 for the reduction, and back. Default false.
  DistributedDataParallelOptions& allreduce_always_fp32(bool value);
  /// Converts wider gradients to this dtype, kHalf or kBFloat16, for the reduction, and back, which
  /// at least halves the traffic. Values beyond fp16's range become inf, which a loss scaler
  /// detects. Default: no conversion.
  DistributedDataParallelOptions& compress(at::ScalarType value);
  /// Sets a custom reduction. Excludes gradient_predivide_factor, allreduce_always_fp32 and
  /// compress.
  DistributedDataParallelOptions& comm_hook(std::shared_ptr<CommHook> value);

  double bucket_cap_mb() const { return bucket_cap_mb_; }
  double first_bucket_mb() const { return first_bucket_mb_; }
  bool broadcast_buffers() const { return broadcast_buffers_; }
  bool find_unused_parameters() const { return find_unused_parameters_; }
  bool static_graph() const { return static_graph_; }
  bool gradient_as_bucket_view() const { return gradient_as_bucket_view_; }
  bool delay_allreduce() const { return delay_allreduce_; }
  std::optional<double> gradient_predivide_factor() const { return gradient_predivide_factor_; }
  bool allreduce_always_fp32() const { return allreduce_always_fp32_; }
  std::optional<at::ScalarType> compress() const { return compress_; }
  const std::shared_ptr<CommHook>& comm_hook() const { return comm_hook_; }

 private:
  double bucket_cap_mb_ = 25;
  double first_bucket_mb_ = 1;
  bool broadcast_buffers_ = true;
  bool find_unused_parameters_ = false;
  bool static_graph_ = false;
  bool gradient_as_bucket_view_ = false;
  bool delay_allreduce_ = false;
  std::optional<double> gradient_predivide_factor_;
  bool allreduce_always_fp32_ = false;
  std::optional<at::ScalarType> compress_;
  std::shared_ptr<CommHook> comm_hook_;
};

/// Options of DistributedDataParallel::join.
struct JoinOptions {
  /// Divides gradients by the number of all ranks (true), or of the ranks that still have input
  /// (false). With true, every row keeps the same weight if all batches have the same size. false is
  /// an Error with a comm_hook.
  TORCH_ARG(bool, divide_by_initial_world_size) = true;
  /// Ends the loop of all ranks when the first rank runs out of input, with an Error on every rank
  /// that names this rank.
  TORCH_ARG(bool, throw_on_early_termination) = false;

  /// A function that a rank without input calls in each step of the others, so that weights,
  /// optimizer state and loss scale stay equal on all ranks, bit for bit. The function must call
  /// receive() once. This sets the gradients of the parameters to the others' means, as a backward
  /// pass does:
  ///
  ///     options.follow([&](const auto& receive) {
  ///       optimizer.zero_grad();
  ///       receive();
  ///       optimizer.step();
  ///     });
  ///
  /// and with mixed precision:
  ///
  ///     options.follow([&](const auto& receive) {
  ///       auto none = mixed.scale_loss(torch::zeros({}), optimizer);
  ///       none.value();
  ///       receive();
  ///       none.finish();
  ///       mixed.step(optimizer);
  ///       mixed.zero_grad(optimizer);
  ///     });
  ///
  /// Default: no function. The model is then copied from the last ranks at the end, with its fp32
  /// masters, and the rank's optimizer state stays as it was when its input ended.
  TORCH_ARG(std::function<void(const std::function<void()>& receive)>, follow);
};

}  // namespace semitone::parallel
