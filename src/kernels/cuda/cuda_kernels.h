#pragma once

// All headers that declare CUDA kernels.
#include "src/kernels/batch_channels_kernel.h"
#include "src/kernels/batch_norm_kernel.h"
#include "src/kernels/column_sums_kernel.h"
#include "src/kernels/cross_entropy_kernel.h"
#include "src/kernels/dropout_kernel.h"
#include "src/kernels/gelu_kernel.h"
#include "src/kernels/kernels.h"
#include "src/kernels/layer_norm_kernel.h"
#include "src/kernels/max_pool_kernel.h"
#include "src/kernels/updates.h"

#include <string_view>

// What holds for all functions that end in _cuda. They have the formulas of the CPU's functions,
// beside which they are declared. Every pointer in them is to memory of the current device, unless
// a comment says otherwise. Spans and structures are in host memory, and are read before a function
// returns. A function starts work on a stream and does not wait for it.
//
// Each operation is rounded once: nvcc may not fuse multiplications and additions (-fmad=false),
// and its divisions and roots are correctly rounded, where no comment says otherwise (gelu, cross
// entropy and the sums of batch norm). Results with a fixed order of operations
// (optimizer steps, dropout, unscaling, maxima) therefore equal the CPU's bit for bit. Sums are
// added in an order that depends only on the shape and on how far from a multiple of 16 bytes the
// tensors begin: in fp32 for at most 256 terms at a time, pairwise for at most 1024, or as two fp32
// numbers (PairSum in reduce.cuh), and these partial sums in fp64. Results do not depend on the
// device, on concurrent work, or on atomics.
//
// Pointers need the alignment of their elements only. Accesses have 16 bytes where the tensors of a
// loop begin equally far from a multiple of that, and the size of an element elsewhere.
namespace semitone::kernels {

// Why a device has none of these functions, with the remedy: the library was built without them, or
// not for such a device. Empty if it has them. If it has not, calling one is an error.
std::string_view why_no_cuda_kernels(int device);
inline bool has_cuda_kernels(int device) {
  return why_no_cuda_kernels(device).empty();
}

}  // namespace semitone::kernels
