#pragma once

#include "src/kernels/batch_norm.h"

#include <ATen/core/Tensor.h>

// Batch normalisation on CUDA with few launches: what a layer computes for each channel between its
// passes over the batch is one launch, instead of some thirty operators. Shapes and formulas are
// those of batch_norm.h; per-channel results are fp64, or fp32 where only the passes read them.
namespace semitone::kernels {

// Tensors (C) that a layer does not have are undefined.
struct BatchNormParameters {
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor running_mean;  // updated
  at::Tensor running_var;   // updated
  double momentum;
  double eps;
};

// Whether there are the functions below for an input on this device with these parameters: for fp32,
// fp16 and bf16 on a CUDA device with Semitone's kernels. The input's layout does not matter.
bool has_channel_kernels(const at::Tensor& input, const BatchNormParameters& parameters);

struct BatchChannels {
  at::Tensor count = {};   // fp64, (1): of all processes together
  at::Tensor invstd = {};  // fp64
  at::Tensor mean = {};    // fp32, and the rest
  at::Tensor scale = {};   // weight * invstd
  at::Tensor shift = {};   // bias
};

// Of the input alone. Two launches.
BatchChannels batch_channels(const at::Tensor& input, const BatchNormParameters& parameters);

// The moments of an input that may be empty: fp64 (2 C + 1) of mean, m2 and the number of values.
at::Tensor joined_moments(const at::Tensor& input);
// From those of all processes, one row each. One launch.
BatchChannels batch_channels_of(const at::Tensor& joined, const BatchNormParameters& parameters);

// relu's part in a gradient: none, or computed again (both undefined if the layer has no relu), or
// with a residual, by relu's result.
struct ReluGradient {
  bool relu = false;
  at::Tensor result = {};  // defined: there is a residual
};

struct BatchGradientParts {
  at::Tensor grad;    // in the input's dtype and layout, as the passes read it
  at::Tensor parts;   // (parts, 2, C)
  ReluGradient relu;  // what is still to do where `grad` is read
};

// One launch, and a copy of the gradient if it is laid out in another way than the input. With a
// residual, `grad` of the result is the gradient after relu.
BatchGradientParts gradient_parts(const at::Tensor& grad, const at::Tensor& input,
                                  const BatchChannels& channels, const ReluGradient& relu);

// Which gradients are wanted; undefined: none.
struct ParameterGradients {
  at::Tensor weight = {};
  at::Tensor bias = {};
};

// Sums of the parts, fp64 (2, C). Writes gradients of the parameters. One launch.
at::Tensor joined_gradients(const at::Tensor& parts, const BatchChannels& channels,
                            const ParameterGradients& gradients);

// Factors b and c of gradient_of_input, from parts of the sums of all processes; writes gradients
// of the parameters. One launch.
struct InputFactors {
  at::Tensor b;
  at::Tensor c;
};
InputFactors input_factors(const at::Tensor& parts, const at::Tensor& weight,
                           const BatchChannels& channels, const ParameterGradients& gradients);

// One launch.
at::Tensor gradient_of_input(const BatchGradientParts& gradient, const at::Tensor& input,
                             const BatchChannels& channels, const InputFactors& factors);

}  // namespace semitone::kernels
