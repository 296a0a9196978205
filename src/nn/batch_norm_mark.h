#pragma once

// Internal interface: other rooms include this header.

#include "src/nn/batch_norm.h"

#include <ATen/core/Tensor.h>

#include <memory>

// Marks on the tensors of LibTorch's batch norm layers, whose statistics cover other batches too.
// parallel::convert_sync_batchnorm sets them; parallel's kernel for aten::batch_norm and autocast's
// choice of kernels read them.
//
// A mark is an entry in the tensor's list of gradient hooks that changes no gradient. This list is
// the only place in LibTorch where a C++ tensor can own a foreign object. A mark therefore lives
// and dies with its tensor, set_data and set_ (and with them Module::to and torch::load) keep it,
// and no process-wide table is needed.
namespace semitone::nn {

struct BatchNormMark {
  std::shared_ptr<const BatchNormPeers> peers;
  // Whether the tensor is a weight of ones, created to carry the mark of a layer without tensors.
  bool is_placeholder = false;

  // The hook: returns the gradient unchanged.
  at::TensorBase operator()(const at::TensorBase&) const { return {}; }
};

// Replaces an earlier mark.
void set_batch_norm_mark(const at::Tensor& tensor, BatchNormMark mark);
void remove_batch_norm_mark(const at::Tensor& tensor);
// Null: none. Valid until the mark is set or removed.
const BatchNormMark* batch_norm_mark(const at::Tensor& tensor);

}  // namespace semitone::nn
