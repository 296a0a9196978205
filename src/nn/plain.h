#pragma once

// Internal interface: other rooms include this header.

#include <ATen/core/Tensor.h>
#include <torch/csrc/jit/frontend/tracer.h>

namespace semitone::nn {

// Whether Semitone's functions may read a tensor's memory directly. Tracers, forward-mode
// derivatives and vmap support LibTorch's operators only, and some tensors have no memory.
inline bool is_plain(const at::Tensor& tensor) {
  return !torch::jit::tracer::isTracing() && !tensor.is_nested() && tensor.has_storage() &&
         !tensor._is_zerotensor() && !tensor._fw_grad(/*level=*/0).defined();
}

// The same of several, of which some may be undefined.
template <typename... Tensors>
bool are_plain(const Tensors&... tensors) {
  return ((!tensors.defined() || is_plain(tensors)) && ...);
}

}  // namespace semitone::nn
