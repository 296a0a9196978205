#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

// Declares a function for CUDA devices, beside the CPU's: SEMITONE_CUDA_KERNEL(void f_cuda(int x));
// cuda/no_cuda.cpp defines the macro otherwise, and so makes of all declarations functions that
// throw, for a library without CUDA.
#ifndef SEMITONE_CUDA_KERNEL
#define SEMITONE_CUDA_KERNEL(...) __VA_ARGS__
#endif

// Plain C functions on pointers, which work on raw memory and do not use LibTorch. Sizes are in
// elements. There is one implementation per processor family: cpu/ (vectorised with Google Highway,
// chosen at run time) and cuda/ (the functions that end in _cuda: cuda/cuda_kernels.h says what
// holds for all of them). The tensor-level functions of multi_tensor.h and so on check, split the
// work and choose. src/kernels/ref/ has the reference implementations.
namespace semitone::kernels {

// The format of an element in memory. fp64 and all others use the reference implementations.
enum class Format : std::uint8_t { fp32, fp16, bf16 };

constexpr std::size_t bytes_of(Format format) {
  return format == Format::fp32 ? 4 : 2;
}

// A cudaStream_t.
struct CudaStream {
  void* handle;
};

// The number of elements of a tensor that one block of threads processes on a CUDA device, in the
// functions for many tensors.
constexpr std::size_t kCudaBlockElements = 8 * 1024;
constexpr std::size_t cuda_blocks(std::size_t size) {
  return (size + kCudaBlockElements - 1) / kCudaBlockElements;
}

// The memory layout of a matrix: rows that follow each other without gaps.
struct RowLayout {
  Format format;
  std::size_t columns;
};

// out[i] = round(in[i] * inv_scale + addend[i]). The multiplication and the addition are rounded to
// fp32 one after the other, and the result is rounded to nearest even if out is a 16-bit format.
// addend may be null (nothing is added) and has out's format. out may be in, or addend. Returns
// whether an out[i] is inf or NaN, and would be if addend[i] were finite. Formats: in == out, or a
// 16-bit in with out fp32.
bool unscale(const void* in, Format in_format, const void* addend, void* out, Format out_format,
             std::size_t size, float inv_scale);
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
SEMITONE_CUDA_KERNEL(void unscale_cuda(std::span<const UnscaleSpan> spans, float inv_scale,
                                       const float* inv_scale_on_device, float* found_inf,
                                       CudaStream stream));

// The sum of in[i]^2, squared and added in fp64, and the largest |in[i]|; both NaN if an element is
// NaN. The order of the additions depends on the instruction set only, not on the values.
double sum_of_squares(const void* in, Format format, std::size_t size);
float max_magnitude(const void* in, Format format, std::size_t size);
struct NormSpan {
  const void* in;
  Format format;
  std::size_t size;
};
// A result for each tensor. parts: memory for one number per block (cuda_blocks) of all tensors
// together.
SEMITONE_CUDA_KERNEL(void sums_of_squares_cuda(std::span<const NormSpan> spans, double* parts,
                                               double* results, CudaStream stream));
SEMITONE_CUDA_KERNEL(void max_magnitudes_cuda(std::span<const NormSpan> spans, double* parts,
                                              double* results, CudaStream stream));

// out[i] = in[i], rounded to nearest, ties to even. NaNs stay NaNs.
void convert(const void* in, Format in_format, void* out, Format out_format, std::size_t size);

// The 8-bit formats of Micikevicius et al. 2022, "FP8 Formats for Deep Learning": e4m3 has numbers
// up to 448 in steps of at least 2^-9, and no infinity; e5m2 up to 57344, at least 2^-16.
enum class Fp8 : std::uint8_t { e4m3, e5m2 };

// out[i] = in[i] * scale, multiplied in fp32, as the nearest number of the fp8 format, ties to even.
// Finite products beyond its largest number become that. Infinities become NaN in e4m3; NaNs stay
// NaNs. Returns the largest finite |in[i]|; 0 without any.
float round_to_fp8(const void* in, Format in_format, float* out, std::size_t size, float scale,
                   Fp8 format);
float max_finite_magnitude(const void* in, Format format, std::size_t size);

// out[i] = 0 where in[i] < 0, else in[i]: so NaNs and -0 stay. out may be in.
void relu(const void* in, void* out, Format format, std::size_t size);

// out[i] = grad[i] where result[i], of relu, is positive or NaN, else 0. out may be grad.
void relu_gradient(const void* grad, const void* result, void* out, Format format,
                   std::size_t size);

// out[i] = round(a[i] + b[i]), the addition in fp32. out may be a, or b.
void add(const void* a, const void* b, void* out, Format format, std::size_t size);

}  // namespace semitone::kernels
