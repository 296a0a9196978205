#pragma once

#include "semitone/comm/group.h"

#include <ATen/core/Tensor.h>

// Tensors that say: batch_norm, when it gets me, is to use the statistics of a group.
//
// A mark is an entry in the tensor's list of gradient hooks that changes no gradient: LibTorch's
// one place where a C++ tensor owns an object of someone else's. So a mark lives and dies with its
// tensor, set_data and set_ (and with them Module::to and torch::load) leave it alone, and no table
// of the process has to know about it.
namespace semitone::parallel {

struct SyncMark {
  comm::Group group;
  // The tensor is a weight of ones that was given to a layer without tensors, to bear the mark.
  bool is_placeholder = false;

  // The hook: no other gradient.
  at::TensorBase operator()(const at::TensorBase&) const { return {}; }
};

// Replaces an earlier mark.
void set_sync_mark(const at::Tensor& tensor, SyncMark mark);
void remove_sync_mark(const at::Tensor& tensor);
// Null: none. Valid until the mark is set or removed.
const SyncMark* sync_mark(const at::Tensor& tensor);

}  // namespace semitone::parallel
