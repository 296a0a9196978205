#pragma once

#include "semitone/comm/group.h"

#include <ATen/core/Tensor.h>

// The arithmetic of batch normalisation over several ranks, with its gradient.
namespace semitone::parallel {

// What goes with the input. Tensors that a layer does not have are undefined.
struct SyncedBatchNorm {
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor running_mean;  // updated
  at::Tensor running_var;   // updated
  double momentum;          // share of this batch in the running statistics
  double eps;
  comm::Group group;
  at::Tensor residual = {};
  bool relu = false;
};

// relu(norm(input) * weight + bias + residual) with the statistics of all the group's inputs.
// Errors: see SyncBatchNorm.
at::Tensor synced_batch_norm(const at::Tensor& input, const SyncedBatchNorm& layer);

}  // namespace semitone::parallel
