#pragma once

#include "src/kernels/kernels.h"

#include <cstddef>

// The functions on pointers behind batch_channels.h: what a batch norm layer computes with a few
// numbers for each channel between its passes over the batch. On a CUDA device one launch replaces
// some thirty operators. On the CPU these are loops (src/nn/batch_norm_channels.cpp). Computed in
// fp64, and rounded once to the format of each result.
namespace semitone::kernels {

// A number for each channel, to be read or written; null: the layer has none.
struct ChannelInput {
  const void* data = nullptr;
  Format format = Format::fp32;
};
struct ChannelOutput {
  void* data = nullptr;
  Format format = Format::fp32;
};

// Moments of parts of a batch. Of part p: means from numbers + p * stride on, sums of squared
// deviations from `channels` further on, and counts from there, one for each channel if
// counts_differ, else a single one.
struct MomentParts {
  const double* numbers;
  std::size_t count;
  std::size_t stride;
  bool counts_differ;
};

struct BatchChannelsWork {
  MomentParts parts;
  std::size_t channels;
  // The moments of the whole batch: (2 channels + 1) of mean, m2, count. May be null, and then what
  // follows is computed.
  double* moments = nullptr;
  ChannelInput weight = {};
  ChannelInput bias = {};
  // running += (moment of the batch - running) * momentum, the variance with count - 1; unless the
  // count is 0.
  ChannelOutput running_mean = {};
  ChannelOutput running_var = {};
  double momentum = 0;
  double eps = 0;
  double* count = nullptr;   // a single one
  double* invstd = nullptr;  // 1 / sqrt(variance + eps)
  float* mean = nullptr;
  float* scale = nullptr;  // weight * invstd
  float* shift = nullptr;  // bias
};
SEMITONE_CUDA_KERNEL(void batch_channels_cuda(const BatchChannelsWork& work, CudaStream stream));

// From (parts, 2, channels) of batch_gradient_sums_cuda, or of sums.
struct BatchChannelGradientsWork {
  const double* parts;
  std::size_t count;
  std::size_t channels;
  ChannelInput weight = {};
  const double* invstd = nullptr;  // null: only the sums are computed
  double* sums = nullptr;          // (2, channels); may be null
  ChannelOutput weight_grad = {};  // sum of grad * (input - mean), times invstd
  ChannelOutput bias_grad = {};    // sum of grad
  // Of all processes; may be null, and then b and c are not computed.
  const double* rows = nullptr;
  float* b = nullptr;  // -sum of grad * (input - mean) / rows * invstd^2 * scale
  float* c = nullptr;  // -sum of grad / rows * scale
};
SEMITONE_CUDA_KERNEL(void batch_channel_gradients_cuda(const BatchChannelGradientsWork& work,
                                                       CudaStream stream));

}  // namespace semitone::kernels
