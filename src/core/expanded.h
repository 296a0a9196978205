#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>

namespace semitone {

// Whether several elements of a tensor have the same memory, as after expand(): no operator can write
// to it.
inline bool is_expanded(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && at::has_internal_overlap(tensor) == at::MemOverlap::Yes;
}

}  // namespace semitone
