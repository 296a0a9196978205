#pragma once

#include "src/core/thread_state.h"

#include <ATen/core/Tensor.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <unordered_map>
#include <vector>

namespace semitone {

// Tells a thread that runs a copy of a model, or a function that gets other tensors in place of its
// inputs, which parameters these are copies of. A property of a parameter, such as staying in fp32,
// then also holds for its copies.
struct ReplicaParameters : c10::DebugInfoBase, std::enable_shared_from_this<ReplicaParameters> {
  // Those of this thread, or null.
  static std::shared_ptr<ReplicaParameters> current() {
    auto* const parameters =
        static_cast<ReplicaParameters*>(c10::ThreadLocalDebugInfo::get(kReplicaState));
    return parameters == nullptr ? nullptr : parameters->shared_from_this();
  }

  const c10::TensorImpl* original_of(const at::Tensor& tensor) const {
    const auto found = originals.find(tensor.unsafeGetTensorImpl());
    return found == originals.end() ? tensor.unsafeGetTensorImpl() : found->second;
  }

  std::unordered_map<const c10::TensorImpl*, const c10::TensorImpl*> originals;  // by copy
  std::vector<at::Tensor> copies;  // those that nothing else keeps as long as this
};

// The parameter of which a tensor is a copy on this thread, or the tensor itself.
inline const c10::TensorImpl* original_of(const at::Tensor& tensor) {
  const auto* parameters =
      static_cast<const ReplicaParameters*>(c10::ThreadLocalDebugInfo::get(kReplicaState));
  return parameters == nullptr ? tensor.unsafeGetTensorImpl() : parameters->original_of(tensor);
}

}  // namespace semitone
