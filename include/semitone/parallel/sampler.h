#pragma once

#include <torch/arg.h>
#include <torch/data/samplers/base.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

/// Training on several processes: what each of them gets of the data, and what they exchange.
namespace semitone::parallel {

/// Options of DistributedSampler; each rank has to pass the same.
class DistributedSamplerOptions {
  /// A new random order for each epoch, or 0, 1, 2 …
  TORCH_ARG(bool, shuffle) = true;
  /// Of the order. seed + epoch seeds the generator, so that every rank draws the same one.
  TORCH_ARG(std::uint64_t, seed) = 0;
  /// Where the data set is no multiple of the ranks: leave its tail out (true), or let some
  /// indices come twice (false). Either way all ranks get equally many.
  TORCH_ARG(bool, drop_last) = false;
};

/// A rank's share of a data set, for training: the same indices in the same order as
/// torch.utils.data.DistributedSampler of PyTorch's Python side gives.
///
///     auto sampler = parallel::DistributedSampler(data.size().value(), world_size, rank);
///     auto loader = torch::data::make_data_loader(data, sampler, /*batch_size=*/64);
///     for (std::size_t epoch = 0; epoch < epochs; ++epoch) {
///       sampler.set_epoch(epoch);
///       for (auto& batch : *loader) { … }
///     }
///
/// The order is torch::randperm(size) with a CPU generator seeded seed + epoch, or 0 … size - 1. It
/// is continued from its own start, or cut, to num_samples() · num_replicas entries, and
/// rank r gets entries r, r + num_replicas, r + 2 · num_replicas … LibTorch's own
/// torch::data::samplers::DistributedRandomSampler gives other lists.
///
/// Copies share the epoch, and nothing else: a DataLoader keeps a copy of its sampler to itself, and
/// what set_epoch says to the original reaches it when the loader begins its next pass.
///
/// Evaluation on padded shares counts some samples twice: use EvaluationSampler there.
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  /// @param size  of the data set; 0 gives no indices
  /// @param num_replicas  how many ranks share it, at least 1. Error otherwise.
  /// @param rank  this one's number, 0 … num_replicas - 1. Error otherwise.
  DistributedSampler(std::size_t size, int num_replicas, int rank,
                     const DistributedSamplerOptions& options = {});

  /// Chooses the order from the next reset on. The epoch is 0 at first.
  void set_epoch(std::size_t epoch);
  std::size_t epoch() const;

  /// Begins a pass over this rank's share in the order of the epoch; the constructor does so too.
  /// @param new_size  of the data set, if it has changed
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;

  /// The next indices: batch_size of them, fewer at the end, nothing after that.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;

  /// Epoch, size of the data set and position in this pass. Loading rebuilds the order from this
  /// sampler's own options. Error if the archive's position does not lie in this rank's share.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  /// How many indices each rank gets in a pass: size / num_replicas, rounded up, or down with
  /// drop_last.
  std::size_t num_samples() const;
  /// What remains of the pass begins here.
  std::size_t index() const { return index_; }

 private:
  std::size_t size_;
  std::size_t num_replicas_;
  std::size_t rank_;
  DistributedSamplerOptions options_;
  std::shared_ptr<std::size_t> epoch_;
  std::vector<std::size_t> indices_;  // this rank's, in the order of this pass
  std::size_t index_ = 0;
};

/// A rank's share of a data set, for evaluation: every index on exactly one rank, so that sums over
/// all ranks (correct answers, losses, counts) are those of the whole set.
///
/// Rank r gets r, r + num_replicas, r + 2 · num_replicas … below the size. Where that does not
/// divide evenly, the first ranks get one index more than the others; so the number of batches may
/// differ by one: communicate after the loop, not in it.
class EvaluationSampler : public torch::data::samplers::Sampler<> {
 public:
  /// As DistributedSampler.
  EvaluationSampler(std::size_t size, int num_replicas, int rank);

  /// Begins again. @param new_size  of the data set, if it has changed
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  /// The next indices: batch_size of them, fewer at the end, nothing after that.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;

  /// Size of the data set and position. Error if the archive's position does not lie in this rank's
  /// share.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  /// How many indices this rank gets.
  std::size_t num_samples() const;
  /// How many of them were given out.
  std::size_t index() const { return index_; }

 private:
  std::size_t size_;
  std::size_t num_replicas_;
  std::size_t rank_;
  std::size_t index_ = 0;
};

}  // namespace semitone::parallel
