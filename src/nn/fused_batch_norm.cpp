#include "semitone/nn/fused_batch_norm.h"

#include "src/nn/batch_norm.h"
#include "src/nn/batch_norm_layer.h"

#include <torch/types.h>

namespace semitone::nn {
namespace {

constexpr auto kFusedBatchNorm = "nn.fused_batch_norm";

}  // namespace

FusedBatchNormImpl::FusedBatchNormImpl(const FusedBatchNormOptions& options_)
    : torch::nn::NormImplBase<2, FusedBatchNormImpl, FusedBatchNormOptions>(options_) {}

void FusedBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  check_channels(kFusedBatchNorm, input, options.num_features());
}

at::Tensor FusedBatchNormImpl::forward(const at::Tensor& input, const at::Tensor& residual) {
  _check_input_dim(input);
  const BatchNorm layer = layer_of(*this, kFusedBatchNorm, residual, options.relu());
  return uses_batch(*this) ? batch_norm(input, layer) : batch_norm_in_evaluation(input, layer);
}

void FusedBatchNormImpl::pretty_print(std::ostream& stream) const {
  print_options(stream, "semitone::nn::FusedBatchNorm", options)
      << ", relu=" << options.relu() << ")";
}

}  // namespace semitone::nn
