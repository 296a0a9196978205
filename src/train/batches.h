#pragma once

#include "src/train/data_set.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/data/samplers/base.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace semitone::train {

// A process's share of a set: its index and the number of processes.
struct Share {
  int rank = 0;
  int ranks = 1;
};

// Examples on their device, divided into batches.
class Batches {
 public:
  // @param channels_last  the memory format of inputs that are images
  Batches(const Examples& examples, c10::Device device, bool channels_last, Share share = {});

  // Examples of the whole set.
  std::int64_t size() const { return examples_->size(); }

  // The indices of the examples, batch by batch; the last batch may be smaller. The order of an epoch
  // depends on seed and epoch only. In each batch, all ranks together have the examples that a
  // single rank would have. Some examples appear twice if the size of the set is not a multiple of
  // the ranks.
  std::vector<at::Tensor> shuffled(std::int64_t batch_size, std::uint64_t seed,
                                   std::int64_t epoch) const;
  // Every example once, on one of the ranks.
  std::vector<at::Tensor> in_order(std::int64_t batch_size) const;

  Batch batch(const at::Tensor& indices) const;
  // With inputs that are changed at random, which depends on seed and epoch only.
  Batch augmented(const at::Tensor& indices, std::uint64_t seed, std::int64_t epoch) const;

 private:
  Batch in_format(Batch batch) const;
  std::vector<at::Tensor> cut(torch::data::samplers::Sampler<>& sampler,
                              std::int64_t batch_size) const;

  std::shared_ptr<const Examples> examples_;
  c10::Device device_;
  bool channels_last_;
  Share share_;
};

}  // namespace semitone::train
