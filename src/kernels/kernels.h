#pragma once

#include <cstddef>
#include <cstdint>

// Plain C functions on pointers, which work on raw memory and do not use LibTorch. Sizes are in
// elements. There is one implementation per processor family: cpu/ (vectorised with Google Highway,
// chosen at run time) and cuda/ (the functions that end in _cuda; no_cuda.cpp replaces them if
// there is no nvcc). The tensor-level functions of multi_tensor.h check, split the work and choose.
// src/kernels/ref/ has the reference implementations.
namespace semitone::kernels {

// The format of an element in memory. fp64 and all others use the reference implementations.
enum class Format : std::uint8_t { fp32, fp16, bf16 };

constexpr std::size_t bytes_of(Format format) {
  return format == Format::fp32 ? 4 : 2;
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

// The sum of in[i]^2, squared and added in fp64, and the largest |in[i]|; both NaN if an element is
// NaN. The order of the additions depends on the instruction set only, not on the values.
double sum_of_squares(const void* in, Format format, std::size_t size);
float max_magnitude(const void* in, Format format, std::size_t size);

// out[i] = in[i], rounded to nearest, ties to even. NaNs stay NaNs.
void convert(const void* in, Format in_format, void* out, Format out_format, std::size_t size);

// out[i] = 0 where in[i] < 0, else in[i]: so NaNs and -0 stay. out may be in.
void relu(const void* in, void* out, Format format, std::size_t size);

// out[i] = grad[i] where result[i], of relu, is positive or NaN, else 0. out may be grad.
void relu_gradient(const void* grad, const void* result, void* out, Format format,
                   std::size_t size);

// out[i] = round(a[i] + b[i]), the addition in fp32. out may be a, or b.
void add(const void* a, const void* b, void* out, Format format, std::size_t size);

}  // namespace semitone::kernels
