#include "src/kernels/batch_norm.h"

#include "src/core/parallel_for.h"
#include "src/kernels/batch_channels.h"
#include "src/kernels/batch_layout.h"
#include "src/kernels/batch_norm_kernel.h"
#include "src/kernels/flat.h"
#include "src/kernels/on_cuda.h"

#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

namespace semitone::kernels {
namespace {

// Reductions are split into parts, for any number of threads; the results are merged in order. At
// most 128 parts, each with so many values of a channel that the results are small compared with
// them, but up to 32 parts in any case.
constexpr std::int64_t kFewestParts = 32;
constexpr std::int64_t kMostParts = 128;
constexpr std::int64_t kValuesInPart = 256;
// Number of channels that justifies a thread when parts are merged.
constexpr std::int64_t kMergeGrain = 256;

// Per-channel values in fp32; null if they are undefined. On the CPU there are few of them, and an operator costs 1 to 2 us, as
// much as a thousand numbers, so they are computed in a loop.
class ChannelValues {
 public:
  explicit ChannelValues(const at::Tensor& values) {
    if (!values.defined()) return;
    if (!values.is_cpu() || values.scalar_type() == at::kFloat) {
      fp32_ = values.to(at::kFloat).contiguous();
      return;
    }
    const at::Tensor fp64 = values.to(at::kDouble).contiguous();
    const auto* const data = fp64.const_data_ptr<double>();
    on_host_.resize(static_cast<std::size_t>(fp64.numel()));
    std::transform(data, data + fp64.numel(), on_host_.begin(),
                   [](double value) { return static_cast<float>(value); });
  }

  const float* data() const {
    if (fp32_.defined()) return fp32_.const_data_ptr<float>();
    return on_host_.empty() ? nullptr : on_host_.data();
  }

 private:
  at::Tensor fp32_;
  std::vector<float> on_host_;
};

// Calls work(first piece, last piece) from several threads.
template <typename Work>
void for_all_pieces(const Batch& batch, const Work& work) {
  parallel_for(0, batch.pieces, batch.grain, [&](std::int64_t begin, std::int64_t end) {
    work(static_cast<std::size_t>(begin), static_cast<std::size_t>(end));
  });
}

// Calls work(first piece, last piece, results of this part) for each part, and returns the results:
// (parts, values, C), initially zeros, which each thread writes for itself.
template <typename Work>
at::Tensor for_all_parts(const Batch& batch, std::int64_t values, const Work& work) {
  const auto channels = static_cast<std::int64_t>(batch.layout.channels);
  const std::int64_t in_channel =
      batch.pieces * static_cast<std::int64_t>(batch.layout.length) / channels;
  const std::int64_t wanted = std::clamp(in_channel / kValuesInPart, kFewestParts, kMostParts);
  const std::int64_t size = std::max(batch.grain, (batch.pieces + wanted - 1) / wanted);
  const std::int64_t parts = (batch.pieces + size - 1) / size;
  at::Tensor results = at::empty({parts, values, channels}, at::kDouble);
  auto* const data = results.mutable_data_ptr<double>();
  parallel_for(0, parts, 1, [&](std::int64_t begin, std::int64_t end) {
    std::fill(data + begin * values * channels, data + end * values * channels, 0.0);
    for (std::int64_t part = begin; part < end; ++part) {
      work(static_cast<std::size_t>(part * size),
           static_cast<std::size_t>(std::min(batch.pieces, (part + 1) * size)),
           data + part * values * channels);
    }
  });
  return results;
}

// Moments of parts (count, mean, m2 by channel), as Chan, Golub and LeVeque merge them.
Moments merged(const at::Tensor& parts) {
  const std::int64_t channels = parts.size(2);
  const auto* const data = parts.const_data_ptr<double>();
  Moments all{at::empty({channels}, parts.options()), at::empty({channels}, parts.options())};
  auto* const mean = all.mean.mutable_data_ptr<double>();
  auto* const m2 = all.m2.mutable_data_ptr<double>();
  // All channels of a part before the next part, in memory order. In the other order, 2048 channels
  // cost half a millisecond of cache misses.
  parallel_for(0, channels, kMergeGrain, [&](std::int64_t begin, std::int64_t end) {
    const auto for_parts = [&](const auto& visit) {
      for (std::int64_t part = 0; part < parts.size(0); ++part) {
        const double* const of = data + part * 3 * channels;
        for (std::int64_t channel = begin; channel < end; ++channel)
          visit(channel, of[channel], of[channels + channel], of[2 * channels + channel]);
      }
    };
    std::vector<double> total(static_cast<std::size_t>(end - begin));
    std::fill(mean + begin, mean + end, 0.0);
    std::fill(m2 + begin, m2 + end, 0.0);
    for_parts([&](std::int64_t channel, double count, double part_mean, double) {
      total[static_cast<std::size_t>(channel - begin)] += count;
      mean[channel] += count * part_mean;
    });
    for (std::int64_t channel = begin; channel < end; ++channel)
      mean[channel] /= total[static_cast<std::size_t>(channel - begin)];
    for_parts([&](std::int64_t channel, double count, double part_mean, double part_m2) {
      const double off = part_mean - mean[channel];
      m2[channel] += part_m2 + count * off * off;
    });
  });
  return all;
}

GradientSums sums_of(const Batch& batch, const BatchGradient& work) {
  const at::Tensor sums =
      for_all_parts(batch, 2, [&](std::size_t begin, std::size_t end, double* results) {
        batch_gradient_sums(batch.layout, work, begin, end, results,
                            results + batch.layout.channels);
      }).sum(0);
  return {sums[0], sums[1]};
}

BatchChannels channels_on_cuda(const at::Tensor& mean, const BatchRelu& relu) {
  const auto fp32 = [](const at::Tensor& values) {
    return values.defined() ? values.to(at::kFloat).contiguous() : values;
  };
  return {.mean = fp32(mean), .scale = fp32(relu.scale), .shift = fp32(relu.shift)};
}

GradientSums joined_on_cuda(const BatchGradientParts& parts, const BatchChannels& channels) {
  const at::Tensor joined = joined_gradients(parts.parts, channels, {});
  return {joined[0], joined[1]};
}

}  // namespace

Moments moments(const at::Tensor& input) {
  const auto batch = Batch::of(input);
  if (!batch.has_value()) return ref::moments(input);
  if (runs_on_cuda(input)) {
    const at::Tensor joined = joined_moments(input);
    return {joined.narrow(0, 0, input.size(1)), joined.narrow(0, input.size(1), input.size(1))};
  }
  const auto channels = batch->layout.channels;
  const at::Tensor parts =
      for_all_parts(*batch, 3, [&](std::size_t begin, std::size_t end, double* results) {
        batch_moments(batch->layout, input.const_data_ptr(), begin, end,
                      {results, results + channels, results + 2 * channels});
      });
  return merged(parts);
}

at::Tensor normalize(const at::Tensor& input, const at::Tensor& mean, const at::Tensor& scale,
                     const at::Tensor& shift, const at::Tensor& residual, bool relu) {
  const auto batch = Batch::of(input);
  if (!batch.has_value() || (residual.defined() && !match(residual, input)))
    return ref::normalize(input, mean, scale, shift, residual, relu);
  at::Tensor output = at::empty_like(input);
  const ChannelValues means(mean);
  const ChannelValues scales(scale);
  const ChannelValues shifts(shift);
  const at::Tensor added =
      residual.defined() ? laid_out_like(residual, input, input.scalar_type()) : residual;
  const BatchNormalize work{.input = input.const_data_ptr(),
                            .residual = added.defined() ? added.const_data_ptr() : nullptr,
                            .output = output.mutable_data_ptr(),
                            .mean = means.data(),
                            .scale = scales.data(),
                            .shift = shifts.data(),
                            .relu = relu};
  if (runs_on_cuda(input)) {
    batch_normalize_cuda(batch->layout, work, batch->count(), CurrentCuda(input).stream());
    return output;
  }
  for_all_pieces(*batch, [&](std::size_t begin, std::size_t end) {
    batch_normalize(batch->layout, work, begin, end);
  });
  return output;
}

bool has_batch_kernels(const at::Tensor& input) {
  return Batch::of(input).has_value();
}

GradientSums gradient_sums(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean,
                           const BatchRelu& relu) {
  const auto batch = Batch::of(input);
  if (!batch.has_value() || !match(grad, input)) return ref::gradient_sums(grad, input, mean, relu);
  if (runs_on_cuda(input)) {
    const BatchChannels channels = channels_on_cuda(mean, relu);
    return joined_on_cuda(gradient_parts(grad, input, channels, {relu.shift.defined()}), channels);
  }
  const ChannelValues means(mean);
  const ChannelValues scales(relu.scale);
  const ChannelValues shifts(relu.shift);
  const at::Tensor gradient = laid_out_like(grad, input, input.scalar_type());
  return sums_of(*batch, {.grad = gradient.const_data_ptr(),
                          .input = input.const_data_ptr(),
                          .mean = means.data(),
                          .a = scales.data(),
                          .shift = shifts.data()});
}

MaskedGradient masked_gradient(const at::Tensor& grad, const at::Tensor& input,
                               const at::Tensor& mean, const at::Tensor& result) {
  const auto batch = Batch::of(input);
  if (!batch.has_value() || !match(grad, input) || !match(result, input))
    return ref::masked_gradient(grad, input, mean, result);
  if (runs_on_cuda(input)) {
    const BatchChannels channels = channels_on_cuda(mean, {});
    const BatchGradientParts parts = gradient_parts(grad, input, channels, {true, result});
    return {parts.grad, joined_on_cuda(parts, channels)};
  }
  const ChannelValues means(mean);
  const at::Tensor gradient = laid_out_like(grad, input, input.scalar_type());
  const at::Tensor relus = laid_out_like(result, input, input.scalar_type());
  at::Tensor masked = at::empty_like(input);
  GradientSums sums = sums_of(*batch, {.grad = gradient.const_data_ptr(),
                                       .input = input.const_data_ptr(),
                                       .mean = means.data(),
                                       .result = relus.const_data_ptr(),
                                       .masked = masked.mutable_data_ptr()});
  return {masked, sums};
}

at::Tensor gradient_of_input(const at::Tensor& grad, const at::Tensor& input,
                             const at::Tensor& mean, const at::Tensor& a, const at::Tensor& b,
                             const at::Tensor& c, const at::Tensor& shift) {
  const auto batch = Batch::of(input);
  if (!batch.has_value() || !match(grad, input))
    return ref::gradient_of_input(grad, input, mean, a, b, c, shift);
  at::Tensor output = at::empty_like(input);
  const ChannelValues means(mean);
  const ChannelValues as(a);
  const ChannelValues bs(b);
  const ChannelValues cs(c);
  const ChannelValues shifts(shift);
  const at::Tensor gradient = laid_out_like(grad, input, input.scalar_type());
  const BatchGradient work{.grad = gradient.const_data_ptr(),
                           .input = input.const_data_ptr(),
                           .mean = means.data(),
                           .output = output.mutable_data_ptr(),
                           .a = as.data(),
                           .b = bs.data(),
                           .c = cs.data(),
                           .shift = shifts.data()};
  if (runs_on_cuda(input)) {
    batch_gradient_of_input_cuda(batch->layout, work, batch->count(), CurrentCuda(input).stream());
    return output;
  }
  for_all_pieces(*batch, [&](std::size_t begin, std::size_t end) {
    batch_gradient_of_input(batch->layout, work, begin, end);
  });
  return output;
}

}  // namespace semitone::kernels
