#include "semitone/nn/fused_batch_norm.h"

#include "src/nn/batch_norm.h"
#include "src/nn/batch_norm_layer.h"
#include "src/nn/batch_norm_mark.h"

#include <torch/types.h>

namespace semitone::nn {
namespace {

constexpr auto kFusedBatchNorm = "nn.fused_batch_norm";

// Adds the other batches over which a layer normalises, if parallel::convert_sync_batchnorm has
// marked it.
void add_peers(BatchNorm& layer) {
  const BatchNormMark* mark = batch_norm_mark(layer.weight);
  if (mark == nullptr) mark = batch_norm_mark(layer.running_mean);
  if (mark == nullptr) return;
  layer.peers = mark->peers;
  if (mark->is_placeholder) layer.weight = at::Tensor();
}

}  // namespace

FusedBatchNormImpl::FusedBatchNormImpl(const FusedBatchNormOptions& options_)
    : torch::nn::NormImplBase<2, FusedBatchNormImpl, FusedBatchNormOptions>(options_) {}

void FusedBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  check_channels(kFusedBatchNorm, input, options.num_features());
}

at::Tensor FusedBatchNormImpl::forward(const at::Tensor& input, const at::Tensor& residual) {
  _check_input_dim(input);
  BatchNorm layer = layer_of(*this, kFusedBatchNorm, residual, options.relu());
  if (!uses_batch(*this)) return batch_norm_in_evaluation(input, layer);
  add_peers(layer);
  return batch_norm(input, layer);
}

void FusedBatchNormImpl::pretty_print(std::ostream& stream) const {
  print_options(stream, "semitone::nn::FusedBatchNorm", options)
      << ", relu=" << options.relu() << ")";
}

}  // namespace semitone::nn
