#pragma once

#include <c10/core/ScalarType.h>
#include <torch/arg.h>

#include <cstdint>
#include <string>
#include <vector>

namespace semitone::amp {

/// How a policy computes products in fp8 (CastPolicy::fp8). The defaults are those of NVIDIA's
/// Transformer Engine 2 (DelayedScaling with the format HYBRID).
struct Fp8Options {
  /// The format of inputs and weights: torch::kFloat8_e4m3fn, which has 3 bits of significand and
  /// ends at 448, or torch::kFloat8_e5m2, which has 2 bits and ends at 57344. Default e4m3fn.
  TORCH_ARG(c10::ScalarType, forward) = c10::ScalarType::Float8_e4m3fn;
  /// The format of the gradients that reach a product in the backward pass. Default e5m2: gradients
  /// need the range.
  TORCH_ARG(c10::ScalarType, backward) = c10::ScalarType::Float8_e5m2;
  /// Number of steps whose largest values give a scale, at least 1. 1: the last step's. A step is
  /// what ends with Fp8Scaling::update(), which MixedPrecision::step calls: with several optimizers,
  /// an iteration has several. Default 1024.
  TORCH_ARG(std::int64_t, amax_history) = 1024;
  /// Scales are divided by two to this power, so that values may grow that much from the largest
  /// one of the history before they are limited. 0 to 16: e4m3 has 18 powers of two. Default 0.
  TORCH_ARG(std::int64_t, margin) = 0;
  /// Globs (as in CastPolicy::keep_fp32_params) of the parameters whose products stay in 16 bits.
  /// The first and the last layer are usual. Default: none.
  TORCH_ARG(std::vector<std::string>, keep_16bit_params);
};

}  // namespace semitone::amp
