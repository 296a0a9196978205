#include "semitone/parallel/sampler.h"

#include "semitone/core/error.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

namespace semitone::parallel {
namespace {

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

void check_index(std::string_view component, std::size_t index, std::size_t num_samples) {
  if (index > num_samples) {
    throw Error(component,
                "a position within the " + std::to_string(num_samples) + " samples of this rank",
                std::to_string(index), "load what a sampler with the same options has saved");
  }
}

void write(torch::serialize::OutputArchive& archive, const std::string& key, std::size_t value) {
  archive.write(key, torch::tensor(static_cast<std::int64_t>(value), torch::kLong),
                /*is_buffer=*/true);
}

std::size_t read(torch::serialize::InputArchive& archive, const std::string& key) {
  torch::Tensor tensor = torch::empty(1, torch::kLong);
  archive.read(key, tensor, /*is_buffer=*/true);
  return static_cast<std::size_t>(tensor.item<std::int64_t>());
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
      num_replicas_(checked_replicas("parallel.distributed_sampler", num_replicas)),
      rank_(checked_rank("parallel.distributed_sampler", rank, num_replicas_)),
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

std::size_t DistributedSampler::num_samples() const {
  const std::size_t whole = size_ / num_replicas_;
  return whole + (!options_.drop_last() && size_ % num_replicas_ != 0 ? 1 : 0);
}

void DistributedSampler::reset(std::optional<std::size_t> new_size) {
  size_ = new_size.value_or(size_);
  std::vector<std::size_t> order;
  if (options_.shuffle()) order = random_order(size_, options_.seed() + *epoch_);
  indices_.resize(num_samples());
  for (std::size_t i = 0; i < indices_.size(); ++i) {
    const std::size_t position = (rank_ + i * num_replicas_) % size_;
    indices_[i] = options_.shuffle() ? order[position] : position;
  }
  index_ = 0;
}

std::optional<std::vector<std::size_t>> DistributedSampler::next(std::size_t batch_size) {
  check_batch_size("parallel.distributed_sampler", batch_size);
  const std::size_t count = std::min(batch_size, indices_.size() - index_);
  if (count == 0) return std::nullopt;
  const auto begin = indices_.begin() + static_cast<std::ptrdiff_t>(index_);
  index_ += count;
  return std::vector<std::size_t>(begin, begin + static_cast<std::ptrdiff_t>(count));
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  write(archive, "epoch", *epoch_);
  write(archive, "size", size_);
  write(archive, "index", index_);
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  const std::size_t epoch = read(archive, "epoch");
  const std::size_t size = read(archive, "size");
  const std::size_t index = read(archive, "index");
  DistributedSampler loaded = *this;
  loaded.epoch_ = std::make_shared<std::size_t>(epoch);
  loaded.reset(size);
  check_index("parallel.distributed_sampler", index, loaded.num_samples());
  *epoch_ = epoch;
  size_ = size;
  indices_ = std::move(loaded.indices_);
  index_ = index;
}

EvaluationSampler::EvaluationSampler(std::size_t size, int num_replicas, int rank)
    : size_(size),
      num_replicas_(checked_replicas("parallel.evaluation_sampler", num_replicas)),
      rank_(checked_rank("parallel.evaluation_sampler", rank, num_replicas_)) {}

std::size_t EvaluationSampler::num_samples() const {
  return size_ / num_replicas_ + (rank_ < size_ % num_replicas_ ? 1 : 0);
}

void EvaluationSampler::reset(std::optional<std::size_t> new_size) {
  size_ = new_size.value_or(size_);
  index_ = 0;
}

std::optional<std::vector<std::size_t>> EvaluationSampler::next(std::size_t batch_size) {
  check_batch_size("parallel.evaluation_sampler", batch_size);
  const std::size_t count = std::min(batch_size, num_samples() - index_);
  if (count == 0) return std::nullopt;
  std::vector<std::size_t> batch(count);
  for (std::size_t& sample : batch) sample = rank_ + num_replicas_ * index_++;
  return batch;
}

void EvaluationSampler::save(torch::serialize::OutputArchive& archive) const {
  write(archive, "size", size_);
  write(archive, "index", index_);
}

void EvaluationSampler::load(torch::serialize::InputArchive& archive) {
  EvaluationSampler loaded = *this;
  loaded.size_ = read(archive, "size");
  loaded.index_ = read(archive, "index");
  check_index("parallel.evaluation_sampler", loaded.index_, loaded.num_samples());
  *this = std::move(loaded);
}

}  // namespace semitone::parallel
