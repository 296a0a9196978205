#pragma once

#include "src/core/thread_state.h"

#include <ATen/core/Tensor.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <unordered_map>

namespace semitone {

// Tells a thread that runs a copy of a model which parameters its tensors are copies of. A property
// of a parameter, such as staying in fp32, then also holds for its copies.
struct ReplicaParameters : c10::DebugInfoBase, std::enable_shared_from_this<ReplicaParameters> {
  // Those of this thread. Null outside of a replica.
  static std::shared_ptr<ReplicaParameters> current() {
    auto* const parameters =
        static_cast<ReplicaParameters*>(c10::ThreadLocalDebugInfo::get(kReplicaState));
    return parameters == nullptr ? nullptr : parameters->shared_from_this();
  }

  std::unordered_map<const c10::TensorImpl*, const c10::TensorImpl*> originals;  // by copy
};

// The parameter of which a tensor is a copy on this thread, or the tensor itself.
inline const c10::TensorImpl* original_of(const at::Tensor& tensor) {
  const auto* parameters =
      static_cast<const ReplicaParameters*>(c10::ThreadLocalDebugInfo::get(kReplicaState));
  if (parameters == nullptr) return tensor.unsafeGetTensorImpl();
  const auto found = parameters->originals.find(tensor.unsafeGetTensorImpl());
  return found == parameters->originals.end() ? tensor.unsafeGetTensorImpl() : found->second;
}

}  // namespace semitone
