#include "src/kernels/batch_channels_kernel.h"
#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/cuda/reduce.cuh"

namespace semitone::kernels {
namespace {

// A block joins the parts of kJoined neighbouring channels, 64 bytes of each part. The threads of a
// channel share the parts, and their sums are added pairwise.
constexpr unsigned kJoined = 8;
constexpr unsigned kSharers = kThreads / kJoined;

__device__ std::size_t channel_of_thread() {
  return std::size_t{blockIdx.x} * kJoined + threadIdx.x % kJoined;
}

// Calls visit(part) for this thread's parts.
template <typename Visit>
__device__ void for_parts(std::size_t count, bool is_channel, const Visit& visit) {
  if (!is_channel) return;
#pragma unroll 4
  for (std::size_t part = threadIdx.x / kJoined; part < count; part += kSharers) visit(part);
}

template <typename Data>
__device__ double number_at(const Data& from, std::size_t i, double otherwise) {
  return from.data == nullptr ? otherwise : static_cast<double>(load(from.format, from.data, i));
}

__device__ void put(double value, const ChannelOutput& to, std::size_t i) {
  if (to.data != nullptr) store(to.format, static_cast<float>(value), to.data, i);
}

__device__ void move(const ChannelOutput& running, std::size_t i, double value, double momentum) {
  const double before = number_at(running, i, 0);
  put(before + (value - before) * momentum, running, i);
}

__device__ void finish(const BatchChannelsWork& work, std::size_t channel, double count,
                       double mean, double m2) {
  const double divisor = count < 1 ? 1 : count;
  const double variance = m2 / divisor;
  if (count > 0) {
    const double rest = count - 1;
    move(work.running_mean, channel, mean, work.momentum);
    move(work.running_var, channel, variance * (count / (rest < 1 ? 1 : rest)), work.momentum);
  }
  const double invstd = 1 / sqrt(variance + work.eps);
  if (channel == 0) work.count[0] = count;
  work.invstd[channel] = invstd;
  work.mean[channel] = static_cast<float>(mean);
  work.scale[channel] = static_cast<float>(number_at(work.weight, channel, 1) * invstd);
  work.shift[channel] = static_cast<float>(number_at(work.bias, channel, 0));
}

// The mean first, then the deviations from it: no division for each part.
__global__ void __launch_bounds__(kThreads)
    join_moments(const __grid_constant__ BatchChannelsWork work) {
  const MomentParts& parts = work.parts;
  const std::size_t channels = work.channels;
  const std::size_t channel = channel_of_thread();
  const bool is_channel = channel < channels;
  const std::size_t of_count = 2 * channels + (parts.counts_differ ? channel : 0);
  double sums[2] = {};
  for_parts(parts.count, is_channel, [&](std::size_t part) {
    const double* const of = parts.numbers + part * parts.stride;
    const double size = of[of_count];
    sums[0] += size;
    sums[1] += size * of[channel];
  });
  sum_columns(sums, kJoined);
  const double count = sums[0];
  const double mean = count == 0 ? 0 : sums[1] / count;
  double m2[1] = {};
  for_parts(parts.count, is_channel, [&](std::size_t part) {
    const double* const of = parts.numbers + part * parts.stride;
    const double off = of[channel] - mean;
    m2[0] += of[channels + channel] + of[of_count] * off * off;
  });
  sum_columns(m2, kJoined);
  if (threadIdx.x >= kJoined || !is_channel) return;
  if (work.moments == nullptr) return finish(work, channel, count, mean, m2[0]);
  work.moments[channel] = mean;
  work.moments[channels + channel] = m2[0];
  if (channel == 0) work.moments[2 * channels] = count;
}

__global__ void __launch_bounds__(kThreads)
    join_gradients(const __grid_constant__ BatchChannelGradientsWork work) {
  const std::size_t channels = work.channels;
  const std::size_t channel = channel_of_thread();
  const bool is_channel = channel < channels;
  double sums[2] = {};
  for_parts(work.count, is_channel, [&](std::size_t part) {
    const double* const of = work.parts + part * 2 * channels + channel;
    sums[0] += of[0];
    sums[1] += of[channels];
  });
  sum_columns(sums, kJoined);
  if (threadIdx.x >= kJoined || !is_channel) return;
  if (work.sums != nullptr) {
    work.sums[channel] = sums[0];
    work.sums[channels + channel] = sums[1];
  }
  if (work.invstd == nullptr) return;
  const double invstd = work.invstd[channel];
  put(sums[1] * invstd, work.weight_grad, channel);
  put(sums[0], work.bias_grad, channel);
  if (work.rows == nullptr) return;
  const double scale = number_at(work.weight, channel, 1) * invstd;
  const double rows = *work.rows;
  work.b[channel] = static_cast<float>(-sums[1] / rows * invstd * invstd * scale);
  work.c[channel] = static_cast<float>(-sums[0] / rows * scale);
}

unsigned blocks_for(std::size_t channels) {
  return narrow_grid(ceil_divide(channels, kJoined));
}

}  // namespace

void batch_channels_cuda(const BatchChannelsWork& work, CudaStream stream) {
  launch(stream, blocks_for(work.channels), kThreads, join_moments, work);
}

void batch_channel_gradients_cuda(const BatchChannelGradientsWork& work, CudaStream stream) {
  launch(stream, blocks_for(work.channels), kThreads, join_gradients, work);
}

}  // namespace semitone::kernels
