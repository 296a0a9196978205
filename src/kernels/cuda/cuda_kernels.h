#pragma once

#include "src/kernels/batch_norm_kernel.h"
#include "src/kernels/column_sums_kernel.h"
#include "src/kernels/cross_entropy_kernel.h"
#include "src/kernels/dropout_kernel.h"
#include "src/kernels/gelu_kernel.h"
#include "src/kernels/kernels.h"
#include "src/kernels/layer_norm_kernel.h"
#include "src/kernels/max_pool_kernel.h"
#include "src/kernels/updates.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

// The functions on pointers for CUDA devices: those of kernels.h, updates.h and the *_kernel.h,
// with the same formulas. Every pointer in them is to memory of the current device, unless a
// comment says otherwise. Spans and structures are in host memory, and are read before a function
// returns. A function starts work on a stream and does not wait for it.
//
// Each operation is rounded once: nvcc may not fuse multiplications and additions (-fmad=false),
// and its divisions and roots are correctly rounded. Results with a fixed order of operations
// (optimizer steps, dropout, unscaling, maxima) therefore equal the CPU's bit for bit. Sums are
// added in an order that depends only on the shape: at most 256 terms in fp32, then in fp64.
// Results do not depend on the device, on concurrent work, or on atomics.
namespace semitone::kernels {

// Why a device has none of these functions, with the remedy: the library was built without them, or
// not for such a device. Empty if it has them. If it has not, calling one is an error.
std::string_view why_no_cuda_kernels(int device);
inline bool has_cuda_kernels(int device) {
  return why_no_cuda_kernels(device).empty();
}

// A cudaStream_t.
struct CudaStream {
  void* handle;
};

// ---- many tensors -------------------------------------------------------------------------------

// The unscale of kernels.h.
struct UnscaleSpan {
  const void* in;
  Format in_format;
  const void* addend;  // may be null
  void* out;
  Format out_format;
  std::size_t size;
};

// Sets found_inf = 1 if an element of a result is inf or NaN, and would be if its addend were
// finite. Gradients are multiplied by inv_scale, or by the number at inv_scale_on_device if that is
// not null.
void unscale_cuda(std::span<const UnscaleSpan> spans, float inv_scale,
                  const float* inv_scale_on_device, float* found_inf, CudaStream stream);

// A tensor whose norm is computed.
struct NormSpan {
  const void* in;
  Format format;
  std::size_t size;
};

// The number of elements of a tensor that one block of threads processes.
constexpr std::size_t kCudaBlockElements = 8 * 1024;
constexpr std::size_t cuda_blocks(std::size_t size) {
  return (size + kCudaBlockElements - 1) / kCudaBlockElements;
}

// The sum of squares in fp64, or the largest magnitude, of each tensor. parts: memory for one
// number per block (cuda_blocks) of all tensors together.
void sums_of_squares_cuda(std::span<const NormSpan> spans, double* parts, double* results,
                          CudaStream stream);
void max_magnitudes_cuda(std::span<const NormSpan> spans, double* parts, double* results,
                         CudaStream stream);

// An optimizer step of several parameters (updates.h), which must not share memory. With
// rules_on_device and found_inf, it can be captured in a CUDA graph and repeated with other
// numbers.
template <typename Rule>
struct CudaStep {
  std::span<const UpdateSpan> spans;
  std::span<const Rule> rules;            // one for each span; empty if rules_on_device is given
  const Rule* rules_on_device = nullptr;  // one for each span, in the device's memory
  const float* found_inf = nullptr;       // in the device's memory: unless 0, nothing is written
};
void adam_cuda(const CudaStep<AdamRule>& step, CudaStream stream);
void sgd_cuda(const CudaStep<SgdRule>& step, CudaStream stream);
void novograd_cuda(const CudaStep<NovoGradRule>& step, CudaStream stream);
void adagrad_cuda(const CudaStep<AdagradRule>& step, CudaStream stream);
void lamb_apply_cuda(const CudaStep<LambRule>& step, CudaStream stream);

// parts: memory for two numbers per block of all parameters. squares: for each parameter the sum of
// its squares and of its update's; zeros if found_inf is set.
void lamb_moments_cuda(const CudaStep<LambRule>& step, double* parts, double* squares,
                       CudaStream stream);

// ---- one tensor ---------------------------------------------------------------------------------

// batch_norm_kernel.h, for all pieces of a batch at once. parts: memory for batch_parts_cuda(…) * 3
// (or 2, for sums) * channels numbers. Means, sums and so on have one number for each channel.
std::size_t batch_parts_cuda(const BatchLayout& layout, std::size_t pieces);
void batch_moments_cuda(const BatchLayout& layout, const void* input, std::size_t pieces,
                        double* parts, double* mean, double* m2, CudaStream stream);
void batch_normalize_cuda(const BatchLayout& layout, const BatchNormalize& work, std::size_t pieces,
                          CudaStream stream);
void batch_gradient_sums_cuda(const BatchLayout& layout, const BatchGradient& work,
                              std::size_t pieces, double* parts, double* sums, double* centred_sums,
                              CudaStream stream);
void batch_gradient_of_input_cuda(const BatchLayout& layout, const BatchGradient& work,
                                  std::size_t pieces, CudaStream stream);

// layer_norm_kernel.h and gelu_kernel.h. If columns are summed, rows are split into parts of
// rows_of_part (at most 256), and `parts` receives their sums: (parts, 2, columns) of weight and
// bias, (parts, columns) of gelu's bias. It may be null: no sums.
void layer_normalize_cuda(const RowLayout& layout, const LayerNormalize& work, std::size_t rows,
                          CudaStream stream);
void layer_norm_gradient_cuda(const RowLayout& layout, const LayerNormGradient& work,
                              std::size_t rows, std::size_t rows_of_part, float* parts,
                              CudaStream stream);
void gelu_cuda(const RowLayout& layout, const Gelu& work, std::size_t rows, CudaStream stream);
void gelu_gradient_cuda(const RowLayout& layout, const GeluGradient& work, std::size_t rows,
                        std::size_t rows_of_part, float* parts, CudaStream stream);
void add_up_parts_cuda(const float* parts, std::size_t count, std::size_t size, float* sums,
                       CudaStream stream);

// cross_entropy_kernel.h. Targets need not have been checked: for an invalid one, the row's results
// and gradients are NaN.
void cross_entropy_cuda(const CrossEntropyRows& rows, const CrossEntropyResults& results,
                        std::size_t count, CudaStream stream);
void cross_entropy_gradient_cuda(const CrossEntropyRows& rows, const CrossEntropyGradient& work,
                                 std::size_t count, CudaStream stream);

// dropout_kernel.h: all groups.
void dropout_cuda(const DropoutWork& work, CudaStream stream);

// max_pool_kernel.h, for this number of images.
void max_pool_cuda(const PoolLayout& layout, const void* input, void* output, std::uint8_t* places,
                   std::size_t images, CudaStream stream);
void max_pool_backward_cuda(const PoolLayout& layout, const void* grad, const std::uint8_t* places,
                            void* grad_input, std::size_t images, CudaStream stream);

}  // namespace semitone::kernels
