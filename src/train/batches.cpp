#include "src/train/batches.h"

#include "semitone/parallel/sampler.h"
#include "src/core/splitmix64.h"

#include <torch/types.h>

namespace semitone::train {

Batches::Batches(const Examples& examples, c10::Device device, bool channels_last, Share share)
    : examples_(examples.to(device)),
      device_(device),
      channels_last_(channels_last),
      share_(share) {}

std::vector<at::Tensor> Batches::shuffled(std::int64_t batch_size, std::uint64_t seed,
                                          std::int64_t epoch) const {
  // Mixed: seed 0 in epoch 1 and seed 1 in epoch 0 get unrelated orders.
  parallel::DistributedSampler sampler(
      static_cast<std::size_t>(size()), share_.ranks, share_.rank,
      parallel::DistributedSamplerOptions().seed(splitmix64(seed)));
  sampler.set_epoch(static_cast<std::size_t>(epoch));
  sampler.reset();
  return cut(sampler, batch_size);
}

std::vector<at::Tensor> Batches::in_order(std::int64_t batch_size) const {
  parallel::EvaluationSampler sampler(static_cast<std::size_t>(size()), share_.ranks, share_.rank);
  return cut(sampler, batch_size);
}

std::vector<at::Tensor> Batches::cut(torch::data::samplers::Sampler<>& sampler,
                                     std::int64_t batch_size) const {
  std::vector<at::Tensor> batches;
  while (const auto indices = sampler.next(static_cast<std::size_t>(batch_size))) {
    const std::vector<std::int64_t> numbers(indices->begin(), indices->end());
    batches.push_back(torch::tensor(numbers, torch::dtype(torch::kLong).device(device_)));
  }
  return batches;
}

Batch Batches::batch(const at::Tensor& indices) const {
  return in_format(examples_->batch(indices));
}

Batch Batches::augmented(const at::Tensor& indices, std::uint64_t seed, std::int64_t epoch) const {
  return in_format(examples_->augmented(indices, seed, epoch));
}

Batch Batches::in_format(Batch batch) const {
  // contiguous() would keep a single channel as it is, whose strides fit both formats.
  if (channels_last_) batch.inputs = batch.inputs.clone(at::MemoryFormat::ChannelsLast);
  return batch;
}

}  // namespace semitone::train
