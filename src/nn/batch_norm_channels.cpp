#include "src/nn/batch_norm_channels.h"

#include "semitone/core/error.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace semitone::nn {
namespace {

// The statistics of the batches of all processes. Per channel, fp64; count has one element, and
// stays on the device.
struct Statistics {
  at::Tensor mean;
  at::Tensor variance;  // biased
  at::Tensor count;
};

[[noreturn]] void refuse_one_value(const at::Tensor& input, const BatchNorm& layer) {
  throw Error(layer.component, "more than 1 value a channel on all ranks together",
              c10::str("1 (this rank's input has shape ", input.sizes(), ")"),
              "use larger batches, or evaluation mode");
}

// Chan, Golub and LeVeque: deviations from the common mean, weighted by each process's count.
Statistics gather_statistics(const at::Tensor& input, const BatchNormPeers* peers) {
  const std::int64_t channels = input.size(1);
  const auto own = kernels::moments(input);
  const at::Tensor own_count =
      at::full({1}, channels == 0 ? 0 : input.numel() / channels, own.mean.options());
  if (peers == nullptr) {
    const auto rows = std::max<std::int64_t>(1, channels == 0 ? 1 : input.numel() / channels);
    return {own.mean, own.m2.div(static_cast<double>(rows)), own_count};
  }
  const at::Tensor all = peers->all_gather(at::cat({own.mean, own.m2, own_count}));
  const at::Tensor means = all.narrow(1, 0, channels);
  const at::Tensor m2s = all.narrow(1, channels, channels);
  const at::Tensor counts = all.narrow(1, 2 * channels, 1);

  const at::Tensor count = counts.sum(0);
  const at::Tensor divisor = count.clamp_min(1);
  const at::Tensor mean = means.mul(counts).sum(0).div_(divisor);
  const at::Tensor m2 = m2s.add(means.sub(mean).square_().mul_(counts)).sum(0);
  return {mean, m2.div(divisor), count};
}

// On the CPU, a loop over channels: each ATen operator takes 1 to 2 us for any size, and a layer
// would need 50 of them.
class Loop {
 public:
  explicit Loop(const at::Tensor& channels) : like_(channels) {}

  // fp64 values, or `otherwise` if the layer has none.
  class Values {
   public:
    Values(const at::Tensor& tensor, double otherwise)
        : fp64_(tensor.defined() ? tensor.to(at::kDouble).contiguous() : tensor),
          data_(tensor.defined() ? fp64_.const_data_ptr<double>() : nullptr),
          otherwise_(otherwise) {}
    double operator[](std::int64_t channel) const {
      return data_ == nullptr ? otherwise_ : data_[channel];
    }

   private:
    at::Tensor fp64_;
    const double* data_;
    double otherwise_;
  };

  // value(channel) of each channel.
  template <typename Value>
  at::Tensor operator()(const Value& value) const {
    at::Tensor result = at::empty_like(like_);
    auto* const data = result.mutable_data_ptr<double>();
    for (std::int64_t channel = 0; channel < result.numel(); ++channel)
      data[channel] = value(channel);
    return result;
  }

 private:
  const at::Tensor& like_;
};

// As LibTorch's operator, whose earlier calls in the graph have saved the statistics: without a new
// version, with which their backward pass would fail.
void write_running(const at::Tensor& running, const at::Tensor& values) {
  const at::AutoDispatchBelowADInplaceOrView no_version;
  running.copy_(values);
}

// running + (batch * factor - running) * momentum
void update_running(const at::Tensor& running, const at::Tensor& batch, double factor,
                    double momentum) {
  if (!running.defined()) return;
  const Loop::Values before(running, 0);
  const Loop::Values now(batch, 0);
  write_running(running, Loop(batch)([&](std::int64_t channel) {
                  return before[channel] + (now[channel] * factor - before[channel]) * momentum;
                }));
}

void update_running(const at::Tensor& running, const at::Tensor& batch,
                    const at::Tensor& momentum) {
  if (!running.defined()) return;
  const at::Tensor before = running.to(at::kDouble);
  write_running(running, before.add(batch.sub(before).mul_(momentum)));
}

// Whether there is no value in any process.
void update_running(const BatchNorm& layer, const Statistics& batch) {
  if (batch.count.is_cpu()) {
    const auto count = batch.count.item<double>();
    if (count == 0) return;
    update_running(layer.running_mean, batch.mean, 1, layer.momentum);
    update_running(layer.running_var, batch.variance, count / std::max(1.0, count - 1),
                   layer.momentum);
    return;
  }
  const at::Tensor momentum = batch.count.gt(0).to(at::kDouble).mul_(layer.momentum);
  const at::Tensor unbiased =
      batch.variance.mul(batch.count).div_(batch.count.sub(1).clamp_min_(1));
  update_running(layer.running_mean, batch.mean, momentum);
  update_running(layer.running_var, unbiased, momentum);
}

at::Tensor fp64_or(double value, const at::Tensor& values, const at::Tensor& like) {
  return values.defined() ? values.to(at::kDouble) : at::full_like(like, value);
}

at::Tensor invstd_of(const at::Tensor& variance, double eps) {
  if (!variance.is_cpu()) return variance.add(eps).rsqrt_();
  const Loop::Values of(variance, 0);
  return Loop(variance)([&](std::int64_t channel) { return 1 / std::sqrt(of[channel] + eps); });
}

at::Tensor scale_of(const at::Tensor& weight, const at::Tensor& invstd) {
  if (!invstd.is_cpu()) return fp64_or(1, weight, invstd).mul(invstd);
  const Loop::Values weights(weight, 1);
  const Loop::Values invstds(invstd, 0);
  return Loop(invstd)([&](std::int64_t channel) { return weights[channel] * invstds[channel]; });
}

// Of an input on any device, with the arithmetic above.
kernels::BatchChannels composed_statistics(const at::Tensor& input, const BatchNorm& layer) {
  const Statistics batch = gather_statistics(input, layer.peers.get());
  if (batch.count.is_cpu() && batch.count.item<double>() == 1) refuse_one_value(input, layer);
  update_running(layer, batch);
  const at::Tensor invstd = invstd_of(batch.variance, layer.eps);
  return {batch.count, invstd, batch.mean, scale_of(layer.weight, invstd),
          fp64_or(0, layer.bias, invstd)};
}

}  // namespace

ChannelStatistics channel_statistics(const at::Tensor& input, const BatchNorm& layer) {
  if (layer.peers == nullptr && input.numel() == input.size(1) && input.numel() > 0)
    refuse_one_value(input, layer);
  const kernels::BatchNormParameters parameters{
      layer.weight, layer.bias, layer.running_mean, layer.running_var, layer.momentum, layer.eps};
  if (!kernels::has_channel_kernels(input, parameters))
    return {composed_statistics(input, layer), /*by_kernels=*/false};
  if (layer.peers == nullptr) return {kernels::batch_channels(input, parameters), true};
  const at::Tensor all = layer.peers->all_gather(kernels::joined_moments(input));
  return {kernels::batch_channels_of(all, parameters), true};
}

// @param sums  of all processes
Factors factors_of(const at::Tensor& weight, const at::Tensor& invstd,
                   const kernels::GradientSums& sums, const at::Tensor& count) {
  const at::Tensor scale = scale_of(weight, invstd);
  if (!scale.is_cpu()) {
    return {scale, sums.grad_times_centred.div(count).mul_(invstd.square()).mul_(scale).neg_(),
            sums.grad.div(count).mul_(scale).neg_()};
  }
  const auto rows = count.item<double>();
  const Loop loop(scale);
  const Loop::Values scales(scale, 0);
  const Loop::Values invstds(invstd, 0);
  const Loop::Values grads(sums.grad, 0);
  const Loop::Values centred(sums.grad_times_centred, 0);
  return {scale, loop([&](std::int64_t channel) {
            return -centred[channel] / rows * invstds[channel] * invstds[channel] * scales[channel];
          }),
          loop([&](std::int64_t channel) { return -grads[channel] / rows * scales[channel]; })};
}

}  // namespace semitone::nn
