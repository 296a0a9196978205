#pragma once

// Internal interface: other rooms include this header.

#include <ATen/core/Tensor.h>

#include <initializer_list>

// Shows which tensors the functions of this room read, and when they draw random numbers. LibTorch's
// callbacks see its operators only, and a kernel of Semitone's is none.
namespace semitone::nn {

// Gets the tensors, on this thread. Null unless something looks at them.
using OnKernelRead = void (*)(const at::Tensor&);
inline OnKernelRead& on_kernel_read() {
  thread_local OnKernelRead callback = nullptr;
  return callback;
}

// Called where a function of this room draws random numbers, on this thread. Null as above.
using OnKernelDraw = void (*)();
inline OnKernelDraw& on_kernel_draw() {
  thread_local OnKernelDraw callback = nullptr;
  return callback;
}

// Call it before a kernel reads these tensors. Any may be undefined.
template <typename... Tensors>
void note_kernel_reads(const Tensors&... tensors) {
  const OnKernelRead callback = on_kernel_read();
  if (callback == nullptr) return;
  for (const at::Tensor* tensor : {&tensors...}) {
    if (tensor->defined()) callback(*tensor);
  }
}

}  // namespace semitone::nn
