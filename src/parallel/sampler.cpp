#include "semitone/parallel/sampler.h"

#include "semitone/core/error.h"
#include "src/core/archive.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>

namespace semitone::parallel {
namespace {

constexpr std::string_view kDistributed = "parallel.distributed_sampler";
constexpr std::string_view kEvaluation = "parallel.evaluation_sampler";

std::size_t checked_replicas(std::string_view component, int num_replicas) {
  if (num_replicas < 1)
    throw Error(component, "at least 1 replica", "num_replicas " + std::to_string(num_replicas));
  return static_cast<std::size_t>(num_replicas);
}

std::size_t checked_rank(std::string_view component, int rank, std::size_t num_replicas) {
  if (rank < 0 || static_cast<std::size_t>(rank) >= num_replicas) {
    throw Error(
        component, "a rank from 0 to " + std::to_string(num_replicas - 1),
        "rank " + std::to_string(rank) + " of " + std::to_string(num_replicas) + " replicas",
        "the arguments are size, num_replicas, rank");
  }
  return static_cast<std::size_t>(rank);
}

void check_batch_size(std::string_view component, std::size_t batch_size) {
  if (batch_size == 0) throw Error(component, "a batch size of at least 1", "0");
}

// What a sampler saves.
struct Position {
  std::size_t epoch = 0;     // of DistributedSampler
  std::size_t size = 0;      // of the data set
  std::size_t consumed = 0;  // entries of the order that a different number of ranks have returned
  std::size_t index = 0;     // entries that this rank has returned since
  std::size_t num_replicas = 1;
};

void write(torch::serialize::OutputArchive& archive, const std::string& key, std::size_t value) {
  archive.write(key, torch::tensor(static_cast<std::int64_t>(value), torch::kLong),
                /*is_buffer=*/true);
}

void write(torch::serialize::OutputArchive& archive, const Position& position) {
  write(archive, "size", position.size);
  write(archive, "consumed", position.consumed);
  write(archive, "index", position.index);
  write(archive, "num_replicas", position.num_replicas);
}

std::size_t read(torch::serialize::InputArchive& archive, const std::string& key,
                 std::string_view component) {
  const auto value = read_value<at::Tensor>(archive, key, component);
  if (value.numel() != 1 || value.scalar_type() != at::kLong) {
    throw FileError(component, "an integer for '" + key + "'",
                    c10::str("a tensor of ", value.scalar_type(), " and shape ", value.sizes()));
  }
  return static_cast<std::size_t>(value.item<std::int64_t>());
}

// Without the epoch.
Position read_position(torch::serialize::InputArchive& archive, std::string_view component) {
  const Position position{.size = read(archive, "size", component),
                          .consumed = read(archive, "consumed", component),
                          .index = read(archive, "index", component),
                          .num_replicas = read(archive, "num_replicas", component)};
  constexpr auto kMostRanks = static_cast<std::size_t>(std::numeric_limits<int>::max());
  constexpr auto kMostSamples = static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max());
  if (position.size > kMostSamples || position.consumed > position.size ||
      position.num_replicas > kMostRanks) {
    throw FileError(component, "a position in a data set",
                    fmt::format("{} of {} samples, {} ranks", position.consumed, position.size,
                                position.num_replicas));
  }
  return position;
}

void check_replicas(std::string_view component, const Position& saved, std::size_t num_replicas) {
  if (saved.num_replicas == num_replicas) return;
  throw Error(component, "a state of " + std::to_string(num_replicas) + " ranks",
              "one of " + std::to_string(saved.num_replicas),
              "load_resharded takes the states of all ranks");
}

void check_index(std::string_view component, std::size_t index, std::size_t share) {
  if (index > share) {
    throw Error(component,
                "a position within the " + std::to_string(share) + " samples of this rank",
                std::to_string(index), "load what a sampler with the same options has saved");
  }
}

// A saved pass is finished as it began, which needs all of its samples.
void check_size(std::string_view component, const Position& saved, std::size_t size) {
  if (saved.size <= size) return;
  throw Error(component, fmt::format("a position in at most {} samples", size),
              fmt::format("one in {}", saved.size),
              "load the state of the same data set, or construct the sampler with its size");
}

// The share of a rank if entries are dealt out to the ranks in turn.
std::size_t share_of(std::size_t rank, std::size_t num_replicas, std::size_t entries) {
  return entries / num_replicas + (rank < entries % num_replicas ? 1 : 0);
}

// The position that all ranks of a run have reached together: `index` is the sum of theirs.
Position common_position(std::string_view component, const std::vector<Position>& ranks) {
  if (ranks.empty()) throw Error(component, "a state of each saved rank", "none");
  Position all = ranks.front();
  if (all.num_replicas != ranks.size()) {
    throw Error(component, fmt::format("the states of all {} ranks", all.num_replicas),
                std::to_string(ranks.size()));
  }
  const std::size_t most = share_of(0, ranks.size(), all.size - all.consumed);
  all.index = 0;
  std::vector<std::size_t> indices;
  for (const Position& rank : ranks) {
    if (std::tie(rank.epoch, rank.size, rank.consumed, rank.num_replicas) !=
        std::tie(all.epoch, all.size, all.consumed, all.num_replicas)) {
      throw Error(
          component, "ranks in the same pass over the same data",
          fmt::format("epoch {}, {} of {} samples on rank 0, and epoch {}, {} of {} on rank {}",
                      all.epoch, all.consumed, all.size, rank.epoch, rank.consumed, rank.size,
                      indices.size()));
    }
    check_index(component, rank.index, most);
    all.index += rank.index;
    indices.push_back(rank.index);
  }
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (indices[rank] == share_of(rank, ranks.size(), all.index)) continue;
    throw Error(component, "ranks that have returned equally many indices",
                fmt::format("{}", fmt::join(indices, ", ")), "save between two steps");
  }
  return all;
}

std::vector<std::size_t> random_order(std::size_t size, std::uint64_t seed) {
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  const auto length = static_cast<std::int64_t>(size);
  const torch::Tensor order =
      torch::randperm(length, generator, torch::dtype(torch::kLong).device(torch::kCPU));
  const auto* begin = order.const_data_ptr<std::int64_t>();
  return {begin, begin + length};
}

}  // namespace

// The epoch that all copies of a sampler share. The thread that reads a loader ends passes, while
// the training reads, sets, saves or loads the epoch of the sampler that it has kept.
class DistributedSampler::SharedEpoch {
 public:
  Epoch get() const {
    const std::lock_guard lock(mutex_);
    return epoch_;
  }

  Epoch set(std::size_t number) {
    const std::lock_guard lock(mutex_);
    epoch_.number = number;
    ++epoch_.times_set;
    return epoch_;
  }

  // Advances after a pass, but not if the epoch has been set since the pass began. Copies that
  // complete passes of the same epoch advance it once.
  void advance_after(const Epoch& pass) {
    const std::lock_guard lock(mutex_);
    if (epoch_.times_set == pass.times_set && epoch_.number == pass.number) ++epoch_.number;
  }

 private:
  mutable std::mutex mutex_;
  Epoch epoch_;
};

DistributedSampler::DistributedSampler(std::size_t size, int num_replicas, int rank,
                                       const DistributedSamplerOptions& options)
    : data_size_(size),
      size_(size),
      num_replicas_(checked_replicas(kDistributed, num_replicas)),
      rank_(checked_rank(kDistributed, rank, num_replicas_)),
      options_(options),
      epoch_(std::make_shared<SharedEpoch>()),
      indices_(indices_after(0, size, 0)) {}

void DistributedSampler::set_epoch(std::size_t epoch) {
  epoch_->set(epoch);
}

std::size_t DistributedSampler::epoch() const {
  return epoch_->get().number;
}

std::size_t DistributedSampler::num_samples() const {
  return num_samples_of(size_);
}

std::size_t DistributedSampler::num_samples_of(std::size_t entries) const {
  const std::size_t tail = options_.drop_last() ? entries % num_replicas_ : 0;
  return share_of(0, num_replicas_, entries - tail);
}

std::vector<std::size_t> DistributedSampler::indices_after(std::size_t consumed, std::size_t size,
                                                           std::size_t epoch) const {
  std::vector<std::size_t> order;
  if (options_.shuffle()) order = random_order(size, options_.seed() + epoch);
  std::vector<std::size_t> indices(num_samples_of(size - consumed));
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const std::size_t position = (consumed + rank_ + i * num_replicas_) % size;
    indices[i] = options_.shuffle() ? order[position] : position;
  }
  return indices;
}

// Only a complete pass advances the epoch. If reset() did so too, a rank that begins a pass once
// more than the others (to log a batch, say) would be in another epoch than they are from then on.
void DistributedSampler::advance_if_complete() {
  const bool is_complete = has_begun() && index_ == indices_.size();
  if (options_.advance_epoch() && is_complete) epoch_->advance_after(epoch_of_pass_);
}

void DistributedSampler::reset(std::optional<std::size_t> new_size) {
  data_size_ = new_size.value_or(data_size_);
  size_ = data_size_;
  epoch_of_pass_ = epoch_->get();
  indices_ = indices_after(0, size_, epoch_of_pass_.number);
  consumed_ = 0;
  index_ = 0;
}

std::optional<std::vector<std::size_t>> DistributedSampler::next(std::size_t batch_size) {
  check_batch_size(kDistributed, batch_size);
  const std::size_t count = std::min(batch_size, indices_.size() - index_);
  if (count == 0) return std::nullopt;
  const auto begin = indices_.begin() + static_cast<std::ptrdiff_t>(index_);
  index_ += count;
  advance_if_complete();
  return std::vector<std::size_t>(begin, begin + static_cast<std::ptrdiff_t>(count));
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  write(archive, "epoch",
        options_.advance_epoch() && has_begun() ? epoch_of_pass_.number : epoch());
  write(archive,
        {.size = size_, .consumed = consumed_, .index = index_, .num_replicas = num_replicas_});
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  const std::size_t epoch = read(archive, "epoch", kDistributed);
  const Position saved = read_position(archive, kDistributed);
  check_replicas(kDistributed, saved, num_replicas_);
  check_size(kDistributed, saved, data_size_);
  check_index(kDistributed, saved.index, num_samples_of(saved.size - saved.consumed));
  indices_ = indices_after(saved.consumed, saved.size, epoch);
  epoch_of_pass_ = epoch_->set(epoch);
  size_ = saved.size;
  consumed_ = saved.consumed;
  index_ = saved.index;
  advance_if_complete();
}

void DistributedSampler::load_resharded(std::span<torch::serialize::InputArchive> saved) {
  std::vector<Position> ranks;
  for (torch::serialize::InputArchive& archive : saved) {
    ranks.push_back(read_position(archive, kDistributed));
    ranks.back().epoch = read(archive, "epoch", kDistributed);
  }
  const Position all = common_position(kDistributed, ranks);
  check_size(kDistributed, all, data_size_);
  const std::size_t left = all.size - all.consumed;
  // With drop_last, ranks that have returned all that they get have not returned the tail.
  const std::size_t tail = options_.drop_last() ? left % ranks.size() : 0;
  const bool has_ended = all.index >= left - tail;
  const std::size_t consumed = has_ended ? all.size : all.consumed + all.index;
  indices_ = indices_after(consumed, all.size, all.epoch);
  epoch_of_pass_ = epoch_->set(all.epoch);
  size_ = all.size;
  consumed_ = consumed;
  index_ = 0;
  advance_if_complete();
}

EvaluationSampler::EvaluationSampler(std::size_t size, int num_replicas, int rank)
    : data_size_(size),
      size_(size),
      num_replicas_(checked_replicas(kEvaluation, num_replicas)),
      rank_(checked_rank(kEvaluation, rank, num_replicas_)) {}

std::size_t EvaluationSampler::num_samples() const {
  return share_of(rank_, num_replicas_, size_);
}

void EvaluationSampler::reset(std::optional<std::size_t> new_size) {
  data_size_ = new_size.value_or(data_size_);
  size_ = data_size_;
  consumed_ = 0;
  index_ = 0;
}

std::optional<std::vector<std::size_t>> EvaluationSampler::next(std::size_t batch_size) {
  check_batch_size(kEvaluation, batch_size);
  const std::size_t share = share_of(rank_, num_replicas_, size_ - consumed_);
  const std::size_t count = std::min(batch_size, share - index_);
  if (count == 0) return std::nullopt;
  std::vector<std::size_t> batch(count);
  for (std::size_t& sample : batch) sample = consumed_ + rank_ + num_replicas_ * index_++;
  return batch;
}

void EvaluationSampler::save(torch::serialize::OutputArchive& archive) const {
  write(archive,
        {.size = size_, .consumed = consumed_, .index = index_, .num_replicas = num_replicas_});
}

void EvaluationSampler::load(torch::serialize::InputArchive& archive) {
  const Position saved = read_position(archive, kEvaluation);
  check_replicas(kEvaluation, saved, num_replicas_);
  check_size(kEvaluation, saved, data_size_);
  check_index(kEvaluation, saved.index,
              share_of(rank_, num_replicas_, saved.size - saved.consumed));
  size_ = saved.size;
  consumed_ = saved.consumed;
  index_ = saved.index;
}

void EvaluationSampler::load_resharded(std::span<torch::serialize::InputArchive> saved) {
  std::vector<Position> ranks;
  for (torch::serialize::InputArchive& archive : saved)
    ranks.push_back(read_position(archive, kEvaluation));
  const Position all = common_position(kEvaluation, ranks);
  check_size(kEvaluation, all, data_size_);
  size_ = all.size;
  consumed_ = std::min(all.consumed + all.index, all.size);
  index_ = 0;
}

}  // namespace semitone::parallel
