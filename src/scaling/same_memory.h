#pragma once

// Internal interface: other rooms include this header.

#include <ATen/core/Tensor.h>

namespace semitone::amp {

// Whether two tensors view the same memory, element by element: one weight with two names in a
// model.
inline bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() > 0 && a.const_data_ptr() == b.const_data_ptr() && a.sizes() == b.sizes() &&
         a.strides() == b.strides();
}

}  // namespace semitone::amp
