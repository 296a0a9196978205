#pragma once

#include "semitone/parallel/comm_hook.h"

#include <c10/core/ScalarType.h>

#include <functional>
#include <memory>
#include <optional>

namespace semitone::parallel {

/// Options of DistributedDataParallel, with chained setters. Every rank must give the same.
class DdpOptions {
 public:
  /// Gradients travel in buckets of about this size, in MiB: small enough that the first can leave
  /// while backward still computes the others, large enough for few messages. Default 25.
  DdpOptions& bucket_cap_mb(double value);
  /// The first bucket, the gradients nearest to the loss, leaves early. Default 1.
  DdpOptions& first_bucket_mb(double value);
  /// Before each forward, buffers (running statistics) are made equal to rank 0's. Default true.
  DdpOptions& broadcast_buffers(bool value);
  /// Some parameters may get no gradient in some steps: the graph is searched from forward's results
  /// in each step, and gradients of parameters that no rank used are left alone. Costs that search
  /// and a copy of the results. Default false.
  DdpOptions& find_unused_parameters(bool value);
  /// The same parameters are used, as often, in every step; the first step finds out which, and how
  /// often. Allows unused parameters without a search, and activation checkpointing. Default false.
  DdpOptions& static_graph(bool value);
  /// Gradients lie in the buckets, which saves their size in memory and a copy. A gradient that is
  /// replaced by another tensor is copied into its bucket in the next step. Default false.
  DdpOptions& gradient_as_bucket_view(bool value);
  /// All gradients are reduced in one message for each dtype when backward is done: no overlap, and
  /// nothing to be set for unused parameters, several backward passes or graphs that change. Default
  /// false. Excludes find_unused_parameters, static_graph, gradient_as_bucket_view and comm_hook.
  DdpOptions& delay_allreduce(bool value);
  /// Gradients are divided by this before they are summed over the ranks, and by world size / this
  /// afterwards: against overflow or underflow of 16-bit sums. Default: the world size; its square
  /// root for compress.
  DdpOptions& gradient_predivide_factor(double value);
  /// 16-bit gradients are converted to fp32 before they are reduced, and back. Default false.
  DdpOptions& allreduce_always_fp32(bool value);
  /// Wider gradients are converted to this dtype, kHalf or kBFloat16, before they are reduced, and
  /// back: half the traffic or less. Values beyond fp16's range become inf, which a loss scaler
  /// sees.
  DdpOptions& compress(at::ScalarType value);
  /// A reduction of your own. Excludes gradient_predivide_factor, allreduce_always_fp32, compress.
  DdpOptions& comm_hook(std::shared_ptr<CommHook> value);

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
  /// Gradients are divided by the number of all ranks, or by that of the ranks that still have
  /// input. The former keeps every row's weight the same if all batches are of one size.
  bool divide_by_initial_world_size = true;
  /// The first rank to run out of input ends the loop of all: an Error on every rank, naming one.
  bool throw_on_early_termination = false;

  /// What a rank without input does in each step of the others, so that weights, optimizer state and
  /// loss scale stay equal on all ranks bit for bit. Once in each call it calls receive(), which
  /// gives the parameters the others' mean gradients, as a backward pass does:
  ///
  ///     options.follow = [&](const auto& receive) {
  ///       optimizer.zero_grad();
  ///       receive();
  ///       optimizer.step();
  ///     };
  ///
  /// and with mixed precision:
  ///
  ///     options.follow = [&](const auto& receive) {
  ///       auto none = mixed.scale_loss(torch::zeros({}), optimizer);
  ///       none.value();
  ///       receive();
  ///       none.finish();
  ///       mixed.step(optimizer);
  ///       mixed.zero_grad(optimizer);
  ///     };
  ///
  /// Default: nothing. The model is copied from the last ranks at the end; a rank's optimizer is
  /// where it was when its input ended; fp32 masters come with the model.
  std::function<void(const std::function<void()>& receive)> follow;
};

}  // namespace semitone::parallel
