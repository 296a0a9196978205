#pragma once

#include "semitone/zoo/mnist.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <vector>

namespace semitone::train {

struct Batch {
  at::Tensor images;  // fp32, (B, 1, height, width), 0 to 1
  at::Tensor labels;  // int64, (B)
};

// An image set on its device, cut into batches.
class Batches {
 public:
  Batches(const zoo::ImageSet& set, c10::Device device, bool channels_last);

  std::int64_t size() const { return set_.size(); }

  // The images' numbers, batch by batch, the last one with what is left. The order of an epoch
  // depends on seed and epoch alone.
  std::vector<at::Tensor> shuffled(std::int64_t batch_size, std::uint64_t seed,
                                   std::int64_t epoch) const;
  std::vector<at::Tensor> in_order(std::int64_t batch_size) const;

  Batch batch(const at::Tensor& indices) const;

 private:
  zoo::ImageSet set_;
  bool channels_last_;
};

// Lays the weights of convolutions out as channels last.
void to_channels_last(torch::nn::Module& model);

}  // namespace semitone::train
