#pragma once

#include "src/kernels/batch_channels.h"
#include "src/kernels/batch_norm.h"
#include "src/nn/batch_norm.h"

#include <ATen/core/Tensor.h>

// What a batch norm layer computes for each channel between its passes over the batch: on CUDA by
// one launch of Semitone's (kernels/batch_channels.h), on the CPU by loops, and elsewhere by
// LibTorch's operators.
namespace semitone::nn {

struct ChannelStatistics {
  // All of them fp64, unless by_kernels is set.
  kernels::BatchChannels channels;
  bool by_kernels;
};

// The statistics of the batches of all processes. Updates the layer's running ones. Error for a
// single value per channel in total.
ChannelStatistics channel_statistics(const at::Tensor& input, const BatchNorm& layer);

// The factors of kernels::gradient_of_input: grad * a + (input - mean) * b + c.
struct Factors {
  at::Tensor a;
  at::Tensor b;
  at::Tensor c;
};

// With statistics that are not by_kernels. sums: of all processes.
Factors factors_of(const at::Tensor& weight, const at::Tensor& invstd,
                   const kernels::GradientSums& sums, const at::Tensor& count);

}  // namespace semitone::nn
