#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace semitone {

// A number that changes when all elements of a tensor do. Version counters do not see what is
// written through data(), as LibTorch's SGD does. 0 for tensors on other devices than the CPU, where
// reading would wait for the device, and for elements of other sizes than 2, 4 and 8 bytes.
std::uint64_t fingerprint_of(const at::Tensor& tensor);

}  // namespace semitone
