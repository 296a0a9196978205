#pragma once

#include "semitone/zoo/image_set.h"

#include <ATen/core/Tensor.h>
#include <torch/data/samplers/base.h>

#include <cstdint>
#include <vector>

namespace semitone::train {

struct Batch {
  at::Tensor images;  // fp32, (B, channels, height, width), 0 to 1
  at::Tensor labels;  // int64, (B)
};

// A process's share of a set: its index and the number of processes.
struct Share {
  int rank = 0;
  int ranks = 1;
};

// An image set on its device, divided into batches.
class Batches {
 public:
  Batches(const zoo::ImageSet& set, c10::Device device, bool channels_last, Share share = {});

  // Images of the whole set.
  std::int64_t size() const { return set_.size(); }
  // Batches of a pass over this share.
  std::int64_t count(std::int64_t batch_size) const;

  // The indices of the images, batch by batch; the last batch may be smaller. The order of an epoch
  // depends on seed and epoch only. In each batch, all ranks together have the images that a single
  // rank would have. Some images appear twice if the size of the set is not a multiple of the
  // ranks.
  std::vector<at::Tensor> shuffled(std::int64_t batch_size, std::uint64_t seed,
                                   std::int64_t epoch) const;
  // Every image once, on one of the ranks.
  std::vector<at::Tensor> in_order(std::int64_t batch_size) const;

  Batch batch(const at::Tensor& indices) const;

 private:
  std::vector<at::Tensor> cut(torch::data::samplers::Sampler<>& sampler,
                              std::int64_t batch_size) const;

  zoo::ImageSet set_;
  bool channels_last_;
  Share share_;
};

}  // namespace semitone::train
