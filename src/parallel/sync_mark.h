#pragma once

#include "semitone/comm/group.h"

#include <ATen/core/Tensor.h>

// Marks on tensors, which tell batch_norm to use the statistics of a group.
//
// A mark is an entry in the tensor's list of gradient hooks that changes no gradient. This list is
// the only place in LibTorch where a C++ tensor can own a foreign object. A mark therefore lives
// and dies with its tensor, set_data and set_ (and with them Module::to and torch::load) keep it,
// and no process-wide table is needed.
namespace semitone::parallel {

struct SyncMark {
  comm::Group group;
  // Whether the tensor is a weight of ones, created to carry the mark of a layer without tensors.
  bool is_placeholder = false;

  // The hook: returns the gradient unchanged.
  at::TensorBase operator()(const at::TensorBase&) const { return {}; }
};

// Replaces an earlier mark.
void set_sync_mark(const at::Tensor& tensor, SyncMark mark);
void remove_sync_mark(const at::Tensor& tensor);
// Null: none. Valid until the mark is set or removed.
const SyncMark* sync_mark(const at::Tensor& tensor);

}  // namespace semitone::parallel
