#include "src/kernels/batch_channels.h"

#include "src/kernels/batch_channels_kernel.h"
#include "src/kernels/batch_layout.h"
#include "src/kernels/flat.h"
#include "src/kernels/on_cuda.h"

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace semitone::kernels {
namespace {

at::Tensor fp64(at::IntArrayRef shape, const at::Tensor& like) {
  return at::empty(shape, at::TensorOptions(like.device()).dtype(at::kDouble));
}

at::Tensor fp32(std::int64_t channels, const at::Tensor& like) {
  return at::empty({channels}, at::TensorOptions(like.device()).dtype(at::kFloat));
}

// Memory for (parts, values, C).
at::Tensor memory_for_parts(const Batch& batch, std::int64_t values, const at::Tensor& input) {
  const std::size_t most = batch_parts_cuda(batch.layout, batch.count());
  return fp64(
      {static_cast<std::int64_t>(most), values, static_cast<std::int64_t>(batch.layout.channels)},
      input);
}

at::Tensor used(const at::Tensor& parts, std::size_t count) {
  return parts.narrow(0, 0, static_cast<std::int64_t>(count));
}

at::Tensor moment_parts(const at::Tensor& input) {
  const auto batch = Batch::of(input);
  const at::Tensor parts = memory_for_parts(*batch, 3, input);
  return used(parts,
              batch_moments_cuda(batch->layout, input.const_data_ptr(), batch->count(),
                                 parts.mutable_data_ptr<double>(), CurrentCuda(input).stream()));
}

ChannelInput read(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.const_data_ptr(), *format_of(tensor.scalar_type())};
}

// Running statistics get no new version: LibTorch's operator gives them none either, and saves them
// for its backward pass. Gradients are new.
ChannelOutput written(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {static_cast<char*>(tensor.mutable_data_ptr()), *format_of(tensor.scalar_type())};
}

// parts: (parts, 3, C), or (processes, 2 C + 1).
MomentParts parts_of(const at::Tensor& parts) {
  return {parts.const_data_ptr<double>(), static_cast<std::size_t>(parts.size(0)),
          static_cast<std::size_t>(parts.stride(0)), parts.dim() == 3};
}

BatchChannels finished(const at::Tensor& parts, std::int64_t channels,
                       const BatchNormParameters& parameters) {
  BatchChannels result{fp64({1}, parts), fp64({channels}, parts), fp32(channels, parts),
                       fp32(channels, parts), fp32(channels, parts)};
  BatchChannelsWork work{.parts = parts_of(parts), .channels = static_cast<std::size_t>(channels)};
  work.weight = read(parameters.weight);
  work.bias = read(parameters.bias);
  work.running_mean = written(parameters.running_mean);
  work.running_var = written(parameters.running_var);
  work.momentum = parameters.momentum;
  work.eps = parameters.eps;
  work.count = result.count.mutable_data_ptr<double>();
  work.invstd = result.invstd.mutable_data_ptr<double>();
  work.mean = result.mean.mutable_data_ptr<float>();
  work.scale = result.scale.mutable_data_ptr<float>();
  work.shift = result.shift.mutable_data_ptr<float>();
  batch_channels_cuda(work, CurrentCuda(parts).stream());
  return result;
}

BatchChannelGradientsWork gradients_work(const at::Tensor& parts, const BatchChannels& channels,
                                         const ParameterGradients& gradients) {
  BatchChannelGradientsWork work{.parts = parts.const_data_ptr<double>(),
                                 .count = static_cast<std::size_t>(parts.size(0)),
                                 .channels = static_cast<std::size_t>(parts.size(2))};
  if (channels.invstd.defined()) work.invstd = channels.invstd.const_data_ptr<double>();
  work.weight_grad = written(gradients.weight);
  work.bias_grad = written(gradients.bias);
  return work;
}

}  // namespace

bool has_channel_kernels(const at::Tensor& input, const BatchNormParameters& parameters) {
  if (!runs_on_cuda(input) || !format_of(input.scalar_type()).has_value() || input.size(1) == 0)
    return false;
  if (input.numel() > 0 && !Batch::of(input).has_value()) return false;
  for (const at::Tensor& tensor :
       {parameters.weight, parameters.bias, parameters.running_mean, parameters.running_var}) {
    if (tensor.defined() && (!format_of(tensor.scalar_type()).has_value() ||
                             !tensor.is_contiguous() || tensor.is_neg()))
      return false;
  }
  return true;
}

BatchChannels batch_channels(const at::Tensor& input, const BatchNormParameters& parameters) {
  if (input.numel() == 0) return batch_channels_of(joined_moments(input).unsqueeze(0), parameters);
  return finished(moment_parts(input), input.size(1), parameters);
}

at::Tensor joined_moments(const at::Tensor& input) {
  const std::int64_t channels = input.size(1);
  at::Tensor joined = fp64({2 * channels + 1}, input);
  if (input.numel() == 0) return joined.zero_();
  const at::Tensor parts = moment_parts(input);
  BatchChannelsWork work{.parts = parts_of(parts), .channels = static_cast<std::size_t>(channels)};
  work.moments = joined.mutable_data_ptr<double>();
  batch_channels_cuda(work, CurrentCuda(input).stream());
  return joined;
}

BatchChannels batch_channels_of(const at::Tensor& joined, const BatchNormParameters& parameters) {
  return finished(joined.contiguous(), (joined.size(1) - 1) / 2, parameters);
}

BatchGradientParts gradient_parts(const at::Tensor& grad, const at::Tensor& input,
                                  const BatchChannels& channels, const ReluGradient& relu) {
  BatchGradientParts result{laid_out_like(grad, input, input.scalar_type()), {}, relu};
  if (input.numel() == 0) {
    result.parts = fp64({1, 2, input.size(1)}, input).zero_();
    return result;
  }
  const auto batch = Batch::of(input);
  BatchGradient work{.grad = result.grad.const_data_ptr(),
                     .input = input.const_data_ptr(),
                     .mean = channels.mean.const_data_ptr<float>()};
  at::Tensor masked;
  at::Tensor relu_result;
  if (relu.relu && relu.result.defined()) {
    masked = at::empty_like(input);
    relu_result = laid_out_like(relu.result, input, input.scalar_type());
    work.result = relu_result.const_data_ptr();
    work.masked = masked.mutable_data_ptr();
  } else if (relu.relu) {
    work.a = channels.scale.const_data_ptr<float>();
    work.shift = channels.shift.const_data_ptr<float>();
  }
  const at::Tensor parts = memory_for_parts(*batch, 2, input);
  result.parts = used(parts, batch_gradient_sums_cuda(batch->layout, work, batch->count(),
                                                      parts.mutable_data_ptr<double>(),
                                                      CurrentCuda(input).stream()));
  if (masked.defined()) {
    result.grad = std::move(masked);
    result.relu = {};
  }
  return result;
}

at::Tensor joined_gradients(const at::Tensor& parts, const BatchChannels& channels,
                            const ParameterGradients& gradients) {
  at::Tensor sums = fp64({2, parts.size(2)}, parts);
  BatchChannelGradientsWork work = gradients_work(parts, channels, gradients);
  work.sums = sums.mutable_data_ptr<double>();
  batch_channel_gradients_cuda(work, CurrentCuda(parts).stream());
  return sums;
}

InputFactors input_factors(const at::Tensor& parts, const at::Tensor& weight,
                           const BatchChannels& channels, const ParameterGradients& gradients) {
  InputFactors factors{fp32(parts.size(2), parts), fp32(parts.size(2), parts)};
  BatchChannelGradientsWork work = gradients_work(parts, channels, gradients);
  work.weight = read(weight);
  work.rows = channels.count.const_data_ptr<double>();
  work.b = factors.b.mutable_data_ptr<float>();
  work.c = factors.c.mutable_data_ptr<float>();
  batch_channel_gradients_cuda(work, CurrentCuda(parts).stream());
  return factors;
}

at::Tensor gradient_of_input(const BatchGradientParts& gradient, const at::Tensor& input,
                             const BatchChannels& channels, const InputFactors& factors) {
  at::Tensor output = at::empty_like(input);
  if (input.numel() == 0) return output;
  const auto batch = Batch::of(input);
  BatchGradient work{.grad = gradient.grad.const_data_ptr(),
                     .input = input.const_data_ptr(),
                     .mean = channels.mean.const_data_ptr<float>(),
                     .output = output.mutable_data_ptr(),
                     .a = channels.scale.const_data_ptr<float>(),
                     .b = factors.b.const_data_ptr<float>(),
                     .c = factors.c.const_data_ptr<float>()};
  if (gradient.relu.relu) work.shift = channels.shift.const_data_ptr<float>();
  batch_gradient_of_input_cuda(batch->layout, work, batch->count(), CurrentCuda(input).stream());
  return output;
}

}  // namespace semitone::kernels
