#include "semitone/parallel/sampler.h"

#include "semitone/core/error.h"
#include "src/core/archive.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

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
  std::size_t epoch = 0;
  std::size_t size = 0;
  std::size_t first = 0;
  std::size_t index = 0;
  std::size_t num_replicas = 1;
};

void write(torch::serialize::OutputArchive& archive, const std::string& key, std::size_t value) {
  archive.write(key, torch::tensor(static_cast<std::int64_t>(value), torch::kLong),
                /*is_buffer=*/true);
}

void write(torch::serialize::OutputArchive& archive, const Position& position) {
  write(archive, "epoch", position.epoch);
  write(archive, "size", position.size);
  write(archive, "first", position.first);
  write(archive, "index", position.index);
  write(archive, "num_replicas", position.num_replicas);
}

Position read_position(torch::serialize::InputArchive& archive, std::string_view component) {
  const auto read = [&](const std::string& key) {
    const auto value = read_value<at::Tensor>(archive, key, component);
    const bool is_count = value.numel() == 1 && value.scalar_type() == at::kLong;
    if (!is_count || value.item<std::int64_t>() < 0)
      throw FileError(component, "a count for '" + key + "'", c10::str(value));
    return static_cast<std::size_t>(value.item<std::int64_t>());
  };
  return {read("epoch"), read("size"), read("first"), read("index"), read("num_replicas")};
}

void check_replicas(std::string_view component, const Position& saved, std::size_t num_replicas) {
  if (saved.num_replicas == num_replicas) return;
  throw Error(component, "a state of " + std::to_string(num_replicas) + " ranks",
              "one of " + std::to_string(saved.num_replicas),
              "load_resharded, or Checkpoint::resume, which calls it");
}

void check_index(std::string_view component, std::size_t index, std::size_t share) {
  if (index > share) {
    throw Error(component,
                "a position within the " + std::to_string(share) + " samples of this rank",
                std::to_string(index), "load what a sampler with the same options has saved");
  }
}

std::size_t entries_of(std::size_t rank, std::size_t num_replicas, std::size_t entries) {
  return entries / num_replicas + (rank < entries % num_replicas ? 1 : 0);
}

// The position that ranks have reached together: `index` and `num_replicas` are of all of them.
Position common_position(std::string_view component,
                         std::span<torch::serialize::InputArchive> saved) {
  if (saved.empty()) throw Error(component, "a state of each saved rank", "none");
  std::vector<Position> ranks;
  for (torch::serialize::InputArchive& archive : saved) {
    ranks.push_back(read_position(archive, component));
    if (ranks.back().num_replicas != saved.size()) {
      throw Error(component, fmt::format("the states of all {} ranks", ranks.back().num_replicas),
                  std::to_string(saved.size()));
    }
  }
  Position all = ranks.front();
  all.num_replicas = saved.size();
  all.index = 0;
  std::vector<std::size_t> indices;
  for (const Position& rank : ranks) {
    all.index += rank.index;
    indices.push_back(rank.index);
  }
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const Position& rank = ranks[r];
    if (rank.epoch != all.epoch || rank.size != all.size || rank.first != all.first) {
      throw Error(component, "ranks in the same pass over the same data",
                  fmt::format("epoch {} of {} samples on rank 0, epoch {} of {} on rank {}",
                              all.epoch, all.size, rank.epoch, rank.size, r));
    }
    if (rank.index != entries_of(r, ranks.size(), all.index)) {
      throw Error(component, "ranks that have returned equally many indices",
                  fmt::format("{}", fmt::join(indices, ", ")), "save between two steps");
    }
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

DistributedSampler::DistributedSampler(std::size_t size, int num_replicas, int rank,
                                       const DistributedSamplerOptions& options)
    : size_(size),
      num_replicas_(checked_replicas(kDistributed, num_replicas)),
      rank_(checked_rank(kDistributed, rank, num_replicas_)),
      options_(options),
      epoch_(std::make_shared<std::size_t>(0)) {
  reset();
}

void DistributedSampler::set_epoch(std::size_t epoch) {
  *epoch_ = epoch;
}

std::size_t DistributedSampler::epoch() const {
  return *epoch_;
}

std::size_t DistributedSampler::share_from(std::size_t first) const {
  const std::size_t left = size_ - std::min(first, size_);
  return entries_of(0, num_replicas_, options_.drop_last() ? left - left % num_replicas_ : left);
}

void DistributedSampler::divide_from(std::size_t first) {
  std::vector<std::size_t> order;
  if (options_.shuffle()) order = random_order(size_, options_.seed() + *epoch_);
  indices_.resize(share_from(first));
  for (std::size_t i = 0; i < indices_.size(); ++i) {
    const std::size_t position = (first + rank_ + i * num_replicas_) % size_;
    indices_[i] = options_.shuffle() ? order[position] : position;
  }
  first_ = first;
  index_ = 0;
}

void DistributedSampler::reset(std::optional<std::size_t> new_size) {
  size_ = new_size.value_or(size_);
  divide_from(0);
}

std::optional<std::vector<std::size_t>> DistributedSampler::next(std::size_t batch_size) {
  check_batch_size(kDistributed, batch_size);
  const std::size_t count = std::min(batch_size, indices_.size() - index_);
  if (count == 0) return std::nullopt;
  const auto begin = indices_.begin() + static_cast<std::ptrdiff_t>(index_);
  index_ += count;
  return std::vector<std::size_t>(begin, begin + static_cast<std::ptrdiff_t>(count));
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  write(archive, {*epoch_, size_, first_, index_, num_replicas_});
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  const Position saved = read_position(archive, kDistributed);
  check_replicas(kDistributed, saved, num_replicas_);
  set_position(saved.epoch, saved.size, saved.first, saved.index);
}

void DistributedSampler::load_resharded(std::span<torch::serialize::InputArchive> saved) {
  const Position all = common_position(kDistributed, saved);
  const std::size_t left = all.size - std::min(all.first, all.size);
  // With drop_last, ranks that have returned all that they get have not returned the tail.
  const bool has_ended = all.index + all.num_replicas > left && options_.drop_last();
  set_position(all.epoch, all.size,
               has_ended ? all.size : std::min(all.first + all.index, all.size), 0);
}

void DistributedSampler::set_position(std::size_t epoch, std::size_t size, std::size_t first,
                                      std::size_t index) {
  DistributedSampler loaded = *this;
  loaded.epoch_ = std::make_shared<std::size_t>(epoch);
  loaded.size_ = size;
  loaded.divide_from(first);
  check_index(kDistributed, index, loaded.indices_.size());
  *epoch_ = epoch;
  size_ = size;
  first_ = first;
  indices_ = std::move(loaded.indices_);
  index_ = index;
}

EvaluationSampler::EvaluationSampler(std::size_t size, int num_replicas, int rank)
    : size_(size),
      num_replicas_(checked_replicas(kEvaluation, num_replicas)),
      rank_(checked_rank(kEvaluation, rank, num_replicas_)) {}

std::size_t EvaluationSampler::share_from(std::size_t first) const {
  return entries_of(rank_, num_replicas_, size_ - std::min(first, size_));
}

void EvaluationSampler::reset(std::optional<std::size_t> new_size) {
  size_ = new_size.value_or(size_);
  first_ = 0;
  index_ = 0;
}

std::optional<std::vector<std::size_t>> EvaluationSampler::next(std::size_t batch_size) {
  check_batch_size(kEvaluation, batch_size);
  const std::size_t count = std::min(batch_size, share_from(first_) - index_);
  if (count == 0) return std::nullopt;
  std::vector<std::size_t> batch(count);
  for (std::size_t& sample : batch) sample = first_ + rank_ + num_replicas_ * index_++;
  return batch;
}

void EvaluationSampler::save(torch::serialize::OutputArchive& archive) const {
  write(archive, {0, size_, first_, index_, num_replicas_});
}

void EvaluationSampler::load(torch::serialize::InputArchive& archive) {
  const Position saved = read_position(archive, kEvaluation);
  check_replicas(kEvaluation, saved, num_replicas_);
  EvaluationSampler loaded = *this;
  loaded.size_ = saved.size;
  loaded.first_ = saved.first;
  loaded.index_ = saved.index;
  check_index(kEvaluation, loaded.index_, loaded.share_from(loaded.first_));
  *this = std::move(loaded);
}

void EvaluationSampler::load_resharded(std::span<torch::serialize::InputArchive> saved) {
  const Position all = common_position(kEvaluation, saved);
  size_ = all.size;
  first_ = std::min(all.first + all.index, all.size);
  index_ = 0;
}

}  // namespace semitone::parallel
