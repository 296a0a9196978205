#pragma once

#include "src/kernels/kernels.h"
#include "src/kernels/rounding.h"

#include <cuda_runtime.h>

#include <bit>
#include <cstddef>
#include <cstdint>

// Conversion between elements in memory and fp32, as defined by rounding.h.
namespace semitone::kernels {

__device__ inline std::uint32_t bits_of(float value) {
  return std::bit_cast<std::uint32_t>(value);
}

__device__ inline float number_of(std::uint32_t bits) {
  return std::bit_cast<float>(bits);
}

__device__ inline bool is_nan(float value) {
  return value != value;
}

// Formats as types.
struct Fp32 {
  static constexpr Format kFormat = Format::fp32;
  using Stored = float;
  static __device__ float wide(float stored) { return stored; }
  static __device__ float stored(float value) { return value; }
};
// Devices have instructions for these conversions. They give the bits of rounding.h, except that
// every NaN becomes the same one.
struct Fp16 {
  static constexpr Format kFormat = Format::fp16;
  using Stored = std::uint16_t;
  static __device__ float wide(std::uint16_t stored) {
#ifdef __CUDA_ARCH__
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(stored));
    return value;
#else
    return number_of(fp32_from_fp16(stored));
#endif
  }
  static __device__ std::uint16_t stored(float value) {
    return static_cast<std::uint16_t>(pair(value, 0));
  }
  // The first one in the lower half.
  static __device__ std::uint32_t pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    std::uint32_t bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
    return bits;
#else
    return fp16_from_fp32(bits_of(first)) | (std::uint32_t{fp16_from_fp32(bits_of(second))} << 16);
#endif
  }
};
struct Bf16 {
  static constexpr Format kFormat = Format::bf16;
  using Stored = std::uint16_t;
  static __device__ float wide(std::uint16_t stored) { return number_of(fp32_from_bf16(stored)); }
  static __device__ std::uint16_t stored(float value) {
    return static_cast<std::uint16_t>(pair(value, 0));
  }
  // The first one in the lower half.
  static __device__ std::uint32_t pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    std::uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
    return bits;
#else
    return bf16_from_fp32(bits_of(first)) | (std::uint32_t{bf16_from_fp32(bits_of(second))} << 16);
#endif
  }
};

// Calls work with the format as a type.
template <typename Work>
void with_format(Format format, const Work& work) {
  switch (format) {
    case Format::fp32:
      return work(Fp32{});
    case Format::fp16:
      return work(Fp16{});
    case Format::bf16:
      return work(Bf16{});
  }
}

template <typename F>
__device__ inline float load(const void* from, std::size_t i) {
  return F::wide(static_cast<const typename F::Stored*>(from)[i]);
}

template <typename F>
__device__ inline void store(float value, void* to, std::size_t i) {
  static_cast<typename F::Stored*>(to)[i] = F::stored(value);
}

// Formats are checked again for each element: all threads of a warp take the same branch.
__device__ inline float load(Format format, const void* from, std::size_t i) {
  switch (format) {
    case Format::fp32:
      return load<Fp32>(from, i);
    case Format::fp16:
      return load<Fp16>(from, i);
    case Format::bf16:
      break;
  }
  return load<Bf16>(from, i);
}

__device__ inline void store(Format format, float value, void* to, std::size_t i) {
  switch (format) {
    case Format::fp32:
      return store<Fp32>(value, to, i);
    case Format::fp16:
      return store<Fp16>(value, to, i);
    case Format::bf16:
      return store<Bf16>(value, to, i);
  }
}

}  // namespace semitone::kernels
