#pragma once

#include "src/autocast/emulation.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <span>

// Convolutions of 16-bit tensors, or in channels last, that LibTorch computes wrongly on a CPU,
// through oneDNN. All were found by comparisons with fp32 and fp64 over thousands of shapes, and
// are in LibTorch 2.11; docs/numerics.md describes them for users.
namespace semitone::amp {

// Whether this machine's LibTorch computes a 16-bit convolution with this weight wrongly. On
// processors with AMX, the oneDNN of LibTorch 2.11 to 2.15 returns garbage if a weight has fewer
// than 16 input channels per group, an even number of them, and channels * kernel width is a
// multiple of 32 above 32 (for example 8 channels and width 8), for any stride and padding. An
// example is a patch embedding of 4-channel latents by 16. The first call tries one such
// convolution, so that nothing changes for a repaired LibTorch.
bool convolves_wrongly(const at::Tensor& weight, c10::ScalarType dtype);

// Whether LibTorch may compute a 16-bit convolution, transposed or not, or its gradients, wrongly
// on a processor with AVX512-BF16. In fp32 the same shapes are right.
//
// - Gradients are wanted, there is a stride, and an element of the kernel meets nothing but
//   padding, as at an image of 1x1 with a 3x3 kernel and stride 2. Its part of the weight's
//   gradient is memory that nothing wrote. No trial would be reliable, since that may be zero.
// - Groups of one input channel, a stride in the last dimension, and one result along it: the
//   result itself is wrong.
// - A result meets nothing but padding: some of these crash.
//
// Of 3500 random convolutions with small images, 87 failed in channels last, all with such shapes,
// and 13 contiguous ones; of 800 in fp32, none. The conditions hold for more shapes than fail.
bool may_be_wrong(const MatrixProduct& product, std::span<const c10::IValue> arguments);

// Replaces arguments by others with the same result, where LibTorch's kernels fail in every dtype.
//
// - A strided convolution by a 1x1 kernel, of few channels, in channels last, whose weight's
//   gradient is wanted: LibTorch writes beyond the memory, or is wrong, depending on the number of
//   threads (2 to 15 channels with AVX-512, 2 and 3 with AVX2). The input is replaced by the
//   elements that are read, and the stride by 1.
// - A result meets nothing but padding: in channels last, some crash in fp32 too. The tensors
//   become contiguous.
void avoid_faults(const MatrixProduct& product, std::span<c10::IValue> arguments);

}  // namespace semitone::amp
