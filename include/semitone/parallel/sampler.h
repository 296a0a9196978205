#pragma once

#include <torch/arg.h>
#include <torch/data/samplers/base.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

/// Training on several processes or devices: how data are divided among them, and what they
/// communicate.
namespace semitone::parallel {

/// Options of DistributedSampler. They must be equal on every rank.
class DistributedSamplerOptions {
  /// True: a new random order for each epoch. False: 0, 1, 2 …
  TORCH_ARG(bool, shuffle) = true;
  /// Seed of the order. Every rank seeds its generator with seed + epoch, so that all ranks draw
  /// the same order.
  TORCH_ARG(std::uint64_t, seed) = 0;
  /// What happens if the size of the data set is not a multiple of the number of ranks. True: its
  /// tail is dropped. False: some indices are repeated. All ranks get the same number of indices
  /// either way.
  TORCH_ARG(bool, drop_last) = false;
  /// True: the epoch advances by one when a pass returns its last index. A pass that ends before
  /// that does not advance it, so the next pass has the same order again. False, as in PyTorch: all
  /// passes have the order of epoch 0 unless set_epoch is called.
  TORCH_ARG(bool, advance_epoch) = false;
};

/// A rank's share of a data set, for training. The indices and their order are those of PyTorch's
/// torch.utils.data.DistributedSampler.
///
///     auto sampler = parallel::DistributedSampler(data.size().value(), world_size, rank);
///     auto loader = torch::data::make_data_loader(data, sampler, /*batch_size=*/64);
///     for (std::size_t epoch = 0; epoch < epochs; ++epoch) {
///       sampler.set_epoch(epoch);
///       for (auto& batch : *loader) { … }
///     }
///
/// With DistributedSamplerOptions::advance_epoch, the loop needs no set_epoch if it reads each pass
/// to its end. That includes a DataLoader with drop_last, which takes the last, smaller batch from
/// the sampler and drops it. A rank may also begin a pass, look at a batch and begin again. It then
/// stays in the epoch of the other ranks. But DataLoader workers and data::PrefetchLoader take
/// indices before the training gets their batches. A pass that the training ends early is complete
/// if they have already taken its last index, and this may be so on some ranks only. Therefore call
/// set_epoch before each pass if ranks may end passes early and batches are read ahead.
///
/// The order is torch::randperm(size) with a CPU generator seeded with seed + epoch; without
/// shuffling it is 0, 1, 2 … It is repeated from its start, or cut, to num_samples() · num_replicas
/// entries. Rank r gets the entries r, r + num_replicas, r + 2 · num_replicas … LibTorch's own
/// torch::data::samplers::DistributedRandomSampler gives other orders.
///
/// Copies share the epoch and nothing else. A DataLoader keeps a copy of its sampler, and set_epoch
/// on the original takes effect when the loader starts its next pass. Threads may use different
/// copies at the same time, but not the same one.
///
/// Evaluation on padded shares counts some samples twice: use EvaluationSampler there.
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  /// @param size  of the data set; with 0 there are no indices
  /// @param num_replicas  the number of ranks, at least 1. Error otherwise.
  /// @param rank  this rank's number, 0 … num_replicas - 1. Error otherwise.
  DistributedSampler(std::size_t size, int num_replicas, int rank,
                     const DistributedSamplerOptions& options = {});

  /// Sets the epoch, which selects the order from the next reset on. Initially 0.
  void set_epoch(std::size_t epoch);
  /// Returns the epoch of the next reset. With advance_epoch, it increases by one when a pass
  /// returns its last index, unless set_epoch or load was called during the pass.
  std::size_t epoch() const;

  /// Starts a pass over this rank's share in the order of the epoch. The constructor does so too.
  /// It does not advance the epoch. After load or load_resharded it discards the loaded position:
  /// a loop that resumes in the middle of a pass must not call reset before it has read the rest.
  /// @param new_size  of the data set, if it has changed
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;

  /// Returns the next batch_size indices, fewer at the end, and std::nullopt after that.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;

  /// Saves the epoch, the size of the data set and the position in this pass. load() rebuilds the
  /// order from this sampler's own options. Error if the saved position is not in this rank's
  /// share, or if the saved sampler had another number of ranks. The position belongs to the epoch
  /// of its pass: save before set_epoch, or after the reset that follows it. A sampler that loads a
  /// state from after the last index has nothing left. With advance_epoch, its next reset takes the
  /// next epoch. If the data set has grown since, the pass ends with the samples that it began with,
  /// and the next reset takes this sampler's own size. Error if the saved pass has more samples.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  /// Continues a pass that a different number of ranks have begun. What they have not returned is
  /// redistributed among the current ranks, so that no index is lost except by drop_last, and none
  /// is repeated except as padding. The passes after the next reset are as usual.
  /// Checkpoint::resume calls it.
  /// @param saved  what each rank of the saved run has saved, in the order of their numbers. Error
  ///               unless they are in the same pass, and have returned equally many indices (the
  ///               first ranks may be one ahead)
  void load_resharded(std::span<torch::serialize::InputArchive> saved);

  /// The number of indices that each rank gets in a pass: size / num_replicas, rounded up, or
  /// rounded down with drop_last. There are fewer in the rest of a pass that others have begun.
  std::size_t num_samples() const;
  /// The number of indices already returned in this pass, or in the rest of one that others have
  /// begun.
  std::size_t index() const { return index_; }

 private:
  struct Epoch {
    std::size_t number = 0;
    std::size_t times_set = 0;  // calls of set_epoch, load and load_resharded until then
  };
  class SharedEpoch;

  // Whether this pass has returned indices, here or in the run that was resumed.
  bool has_begun() const { return index_ > 0 || consumed_ > 0; }
  void advance_if_complete();
  // The share of each rank if `entries` of the order are left.
  std::size_t num_samples_of(std::size_t entries) const;
  // This rank's share of what is left after the first `consumed` entries of an order.
  std::vector<std::size_t> indices_after(std::size_t consumed, std::size_t size,
                                         std::size_t epoch) const;

  std::size_t data_size_;  // from the next reset on
  std::size_t size_;       // of the data set in this pass, which another run may have begun
  std::size_t num_replicas_;
  std::size_t rank_;
  DistributedSamplerOptions options_;
  std::shared_ptr<SharedEpoch> epoch_;  // of the next reset, shared by all copies
  Epoch epoch_of_pass_;                 // the shared epoch when this pass began
  std::size_t consumed_ = 0;  // entries of the order that a different number of ranks have returned
  std::vector<std::size_t> indices_;  // this rank's, in the order of this pass
  std::size_t index_ = 0;
};

/// A rank's share of a data set, for evaluation. Every index is on exactly one rank, so that sums
/// over all ranks (correct answers, losses, counts) equal those over the whole set.
///
/// Rank r gets r, r + num_replicas, r + 2 · num_replicas … below the size. If the size is not
/// divisible, the first ranks get one index more than the others, and the number of batches may
/// differ by one. Therefore communicate after the loop, not in it.
class EvaluationSampler : public torch::data::samplers::Sampler<> {
 public:
  /// As for DistributedSampler.
  EvaluationSampler(std::size_t size, int num_replicas, int rank);

  /// Starts a new pass. @param new_size  of the data set, if it has changed
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  /// Returns the next batch_size indices, fewer at the end, and std::nullopt after that.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;

  /// Saves the size of the data set and the position. load() throws Error if the saved position is
  /// not in this rank's share, or if the saved sampler had another number of ranks or more samples.
  /// A pass over fewer samples ends with these, and the next reset takes this sampler's own size.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  /// As DistributedSampler::load_resharded.
  void load_resharded(std::span<torch::serialize::InputArchive> saved);

  /// The number of indices of this rank in a pass.
  std::size_t num_samples() const;
  /// The number of indices already returned in this pass, or in the rest of one that others have
  /// begun.
  std::size_t index() const { return index_; }

 private:
  std::size_t data_size_;  // from the next reset on
  std::size_t size_;       // of the data set in this pass, which another run may have begun
  std::size_t num_replicas_;
  std::size_t rank_;
  std::size_t consumed_ = 0;  // indices that a different number of ranks have returned
  std::size_t index_ = 0;
};

}  // namespace semitone::parallel
