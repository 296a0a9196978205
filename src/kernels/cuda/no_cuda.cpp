#include "semitone/core/error.h"
#include "src/kernels/cuda/cuda_kernels.h"

// Replaces the CUDA kernels if there is no nvcc. These functions are not called, since
// why_no_cuda_kernels returns a reason for every device.
namespace semitone::kernels {
namespace {

[[noreturn]] void fail() {
  throw Error("kernels.cuda", "a library built with the CUDA toolkit", "one built without");
}

}  // namespace

std::string_view why_no_cuda_kernels(int) {
  return "the library was built without nvcc (build it where nvcc 12.1 or newer is found)";
}

void unscale_cuda(std::span<const UnscaleSpan>, float, const float*, float*, CudaStream) {
  fail();
}

void sums_of_squares_cuda(std::span<const NormSpan>, double*, double*, CudaStream) {
  fail();
}

void max_magnitudes_cuda(std::span<const NormSpan>, double*, double*, CudaStream) {
  fail();
}

void adam_cuda(const CudaStep<AdamRule>&, CudaStream) {
  fail();
}

void sgd_cuda(const CudaStep<SgdRule>&, CudaStream) {
  fail();
}

void novograd_cuda(const CudaStep<NovoGradRule>&, CudaStream) {
  fail();
}

void adagrad_cuda(const CudaStep<AdagradRule>&, CudaStream) {
  fail();
}

void lamb_apply_cuda(const CudaStep<LambRule>&, CudaStream) {
  fail();
}

void lamb_moments_cuda(const CudaStep<LambRule>&, double*, double*, CudaStream) {
  fail();
}

std::size_t batch_parts_cuda(const BatchLayout&, std::size_t) {
  fail();
}

void batch_moments_cuda(const BatchLayout&, const void*, std::size_t, double*, double*, double*,
                        CudaStream) {
  fail();
}

void batch_normalize_cuda(const BatchLayout&, const BatchNormalize&, std::size_t, CudaStream) {
  fail();
}

void batch_gradient_sums_cuda(const BatchLayout&, const BatchGradient&, std::size_t, double*,
                              double*, double*, CudaStream) {
  fail();
}

void batch_gradient_of_input_cuda(const BatchLayout&, const BatchGradient&, std::size_t,
                                  CudaStream) {
  fail();
}

void layer_normalize_cuda(const RowLayout&, const LayerNormalize&, std::size_t, CudaStream) {
  fail();
}

void layer_norm_gradient_cuda(const RowLayout&, const LayerNormGradient&, std::size_t, std::size_t,
                              float*, CudaStream) {
  fail();
}

void gelu_cuda(const RowLayout&, const Gelu&, std::size_t, CudaStream) {
  fail();
}

void gelu_gradient_cuda(const RowLayout&, const GeluGradient&, std::size_t, std::size_t, float*,
                        CudaStream) {
  fail();
}

void add_up_parts_cuda(const float*, std::size_t, std::size_t, float*, CudaStream) {
  fail();
}

void cross_entropy_cuda(const CrossEntropyRows&, const CrossEntropyResults&, std::size_t,
                        CudaStream) {
  fail();
}

void cross_entropy_gradient_cuda(const CrossEntropyRows&, const CrossEntropyGradient&, std::size_t,
                                 CudaStream) {
  fail();
}

void dropout_cuda(const DropoutWork&, CudaStream) {
  fail();
}

void max_pool_cuda(const PoolLayout&, const void*, void*, std::uint8_t*, std::size_t, CudaStream) {
  fail();
}

void max_pool_backward_cuda(const PoolLayout&, const void*, const std::uint8_t*, void*, std::size_t,
                            CudaStream) {
  fail();
}

}  // namespace semitone::kernels
