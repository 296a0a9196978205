#include "semitone/nn/fused_batch_norm.h"

#include "semitone/core/error.h"
#include "src/nn/batch_norm.h"

#include <torch/types.h>

#include <string>

namespace semitone::nn {
namespace {

constexpr auto kWhere = "nn.fused_batch_norm";

}  // namespace

FusedBatchNormImpl::FusedBatchNormImpl(const FusedBatchNormOptions& options_)
    : torch::nn::NormImplBase<2, FusedBatchNormImpl, FusedBatchNormOptions>(options_) {}

void FusedBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  if (input.dim() < 2 || input.size(1) != options.num_features()) {
    throw Error(kWhere, "an input (N, " + std::to_string(options.num_features()) + ", ...)",
                c10::str("one of shape ", input.sizes()));
  }
}

double FusedBatchNormImpl::share_of_batch() {
  if (!is_training() || !options.track_running_stats()) return 0;
  num_batches_tracked += 1;
  return options.momentum().has_value() ? *options.momentum()
                                        : 1 / num_batches_tracked.item<double>();
}

at::Tensor FusedBatchNormImpl::forward(const at::Tensor& input, const at::Tensor& residual) {
  _check_input_dim(input);
  const BatchNorm layer{.where = kWhere,
                        .weight = weight,
                        .bias = bias,
                        .running_mean = running_mean,
                        .running_var = running_var,
                        .momentum = share_of_batch(),
                        .eps = options.eps(),
                        .residual = residual,
                        .relu = options.relu()};
  const bool of_batch = is_training() || !options.track_running_stats();
  return of_batch ? batch_norm(input, layer) : batch_norm_in_evaluation(input, layer);
}

void FusedBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "semitone::nn::FusedBatchNorm(" << options.num_features()
         << ", eps=" << options.eps() << ", momentum=";
  if (options.momentum().has_value()) {
    stream << *options.momentum();
  } else {
    stream << "None";
  }
  stream << ", affine=" << options.affine()
         << ", track_running_stats=" << options.track_running_stats() << ", relu=" << options.relu()
         << ")";
}

}  // namespace semitone::nn
