#pragma once

#include "semitone/parallel/comm_hook.h"

#include <torch/arg.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace semitone::parallel {

/// Options of PowerSGDHook: those of torch's PowerSGDState, with its defaults.
struct PowerSGDOptions {
  /// Rank of the approximation, from 1. The number of values that are sent is proportional to it.
  TORCH_ARG(std::int64_t, matrix_approximation_rank) = 1;
  /// Number of backward passes whose gradients are averaged without compression, from 0. Gradients
  /// of the first steps should not be approximated.
  TORCH_ARG(std::int64_t, start_powerSGD_iter) = 1000;
  /// A matrix of n rows and m columns is compressed if (n + m) * rank * min_compression_rate is less
  /// than n * m. More than 0.
  TORCH_ARG(double, min_compression_rate) = 2;
  /// Adds what the approximation of a step lost to the gradients of the next step.
  TORCH_ARG(bool, use_error_feedback) = true;
  /// Starts from the factor Q of the previous step, and not from random numbers.
  TORCH_ARG(bool, warm_start) = true;
  /// Added to the norms of columns when they are orthogonalised, from 0. With 0, a column of zeros
  /// stays zero (in torch it becomes NaN).
  TORCH_ARG(double, orthogonalization_epsilon) = 0;
  /// Seed of the random Qs, equal on all ranks. They are those of torch with this seed.
  TORCH_ARG(std::uint32_t, random_seed) = 0;
};

/// Sends gradient matrices as products of two thin matrices: PowerSGD (Vogels, Karimireddy and
/// Jaggi 2019, arXiv:1905.13727), with the rules of torch's powerSGD_hook.
///
///     const auto hook = std::make_shared<parallel::PowerSGDHook>(model->parameters());
///     parallel::DistributedDataParallel ddp(
///         model, group, parallel::DistributedDataParallelOptions().comm_hook(hook));
///
/// A gradient M is viewed as a matrix of its first extent by the product of the others. With the
/// factor Q of m rows, orthogonalised: P is the sum of the ranks' M Q, orthogonalised; the new Q is
/// the mean of the ranks' transpose(M) P; and every rank's gradient becomes P transpose(Q).
/// Gradients that min_compression_rate excludes are averaged: with 1 or more, all of one dimension.
/// The factors have the dtype of the gradients. Ranks above 2 in fp32 and fp64 are orthogonalised by
/// QR, others by Gram-Schmidt.
///
/// A gradient with an inf or NaN on any rank, or one that overflows in the factors, makes all
/// gradients of its bucket NaN on all ranks. A loss scaler then skips the step on all of them. The
/// errors and the Qs of all buckets then stay as they were before this step, as if it had not been.
/// (In torch they become NaN.)
///
/// Errors are kept in the unit of the gradients, which is that of the scaled loss: see
/// set_loss_scale. The errors take the memory of the gradients twice.
///
/// The second message of a bucket is sent when the next bucket is full, so that both overlap with
/// backward, and all ranks send in the same order. Results therefore do not depend on timing.
///
/// An object serves one DistributedDataParallel.
class PowerSGDHook final : public CommHook {
 public:
  /// @param parameters  of the model, at least those that are trained, in the same order on all
  /// ranks. From the first pass on, reduce() throws Error for another one, and for complex ones
  explicit PowerSGDHook(const std::vector<at::Tensor>& parameters,
                        const PowerSGDOptions& options = {});
  ~PowerSGDHook() override;

  c10::intrusive_ptr<c10::ivalue::Future> reduce(const GradientBucket& bucket,
                                                 const comm::Group& group) override;

  /// Sets the loss scale of the next backward passes. Errors of earlier passes are multiplied by the
  /// ratio of the new and the old one. The first call tells the scale of the errors so far too, and
  /// changes none. Call it after each step, with the same value on all ranks:
  ///
  ///     scaler.update();
  ///     hook->set_loss_scale(scaler.get_scale());
  void set_loss_scale(double scale);

  /// Saves and loads the number of passes, the errors, the Qs and the loss scale. They differ
  /// between ranks: checkpoint.add("hook", *hook) saves those of each rank. load() throws FileError
  /// if the parameters have other shapes, and then changes nothing.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

  /// Loads the states of all ranks of a run that had a different number of them. Each rank gets the
  /// mean of the ranks' errors. Checkpoint::resume calls it.
  void load_resharded(std::span<torch::serialize::InputArchive> saved);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace semitone::parallel
