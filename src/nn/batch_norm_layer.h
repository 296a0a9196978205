#pragma once

// Internal interface: other rooms include this header.

#include "semitone/core/error.h"
#include "src/nn/batch_norm.h"

#include <c10/util/StringUtil.h>

#include <cstdint>
#include <ios>
#include <ostream>
#include <string_view>

// The common part of modules for batch normalisation: children of torch::nn::NormImplBase with the
// options of torch::nn::BatchNorm.
namespace semitone::nn {

// Error unless the input is (N, features, ...).
inline void check_channels(std::string_view component, const at::Tensor& input,
                           std::int64_t features) {
  if (input.dim() < 2 || input.size(1) != features) {
    throw Error(component, c10::str("an input (N, ", features, ", ...)"),
                c10::str("one of shape ", input.sizes()));
  }
}

// Counts a batch, and returns its weight in the running statistics.
template <typename Module>
double share_of_batch(Module& module) {
  if (!module.is_training() || !module.options.track_running_stats()) return 0;
  module.num_batches_tracked += 1;
  return module.options.momentum().has_value()
             ? *module.options.momentum()
             : 1 / module.num_batches_tracked.template item<double>();
}

// Whether to use the statistics of the batch.
template <typename Module>
bool uses_batch(const Module& module) {
  return module.is_training() || !module.options.track_running_stats();
}

// Counts the batch, and returns the parameters of its normalisation.
template <typename Module>
BatchNorm layer_of(Module& module, std::string_view component, const at::Tensor& residual,
                   bool relu) {
  return {.component = component,
          .weight = module.weight,
          .bias = module.bias,
          .running_mean = module.running_mean,
          .running_var = module.running_var,
          .momentum = share_of_batch(module),
          .eps = module.options.eps(),
          .residual = residual,
          .relu = relu};
}

// "Name(features, eps=…, …, track_running_stats=true", without the end.
template <typename Options>
std::ostream& print_options(std::ostream& stream, std::string_view name, const Options& options) {
  stream << std::boolalpha << name << "(" << options.num_features() << ", eps=" << options.eps()
         << ", momentum=";
  if (options.momentum().has_value()) {
    stream << *options.momentum();
  } else {
    stream << "None";
  }
  return stream << ", affine=" << options.affine()
                << ", track_running_stats=" << options.track_running_stats();
}

}  // namespace semitone::nn
