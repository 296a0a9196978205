#pragma once

#include "src/kernels/cuda/elements.cuh"
#include "src/kernels/rounding.h"
#include "src/kernels/updates.h"

#include <cstddef>
#include <cstdint>

// Split masters and stochastic rounding, as defined by rounding.h, in fewer instructions: results
// stay in the upper halves of words until they are stored.
namespace semitone::kernels {

// The upper halves of both, the first one's in the lower half.
__device__ inline std::uint32_t upper_halves(std::uint32_t first, std::uint32_t second) {
#ifdef __CUDA_ARCH__
  return __byte_perm(first, second, 0x7632);
#else
  return first >> 16 | (second & 0xFFFF0000);
#endif
}

// Stores the upper halves of words.
template <unsigned N>
__device__ inline void store_upper(const std::uint32_t (&words)[N], void* to, std::size_t i) {
  auto* const place = static_cast<std::uint16_t*>(to) + i;
  if constexpr (N == 1) {
    *place = static_cast<std::uint16_t>(words[0] >> 16);
  } else {
    std::uint32_t pairs[N / 2];
#pragma unroll
    for (unsigned k = 0; k < N / 2; ++k) pairs[k] = upper_halves(words[2 * k], words[2 * k + 1]);
    store_words(pairs, place);
  }
}

// join_fp32: the lower half is a signed distance.
__device__ inline float joined(std::uint16_t high, std::uint16_t low) {
  const std::uint32_t upper = std::uint32_t{high} << 16;
  const auto distance = static_cast<std::int32_t>(static_cast<std::int16_t>(low));
  const bool is_ignored = upper << 1 == 0 && distance < 0;
  return number_of(is_ignored ? upper : upper + static_cast<std::uint32_t>(distance));
}

template <unsigned N>
__device__ inline void load_split(const UpdateSpan& span, std::size_t i, float (&values)[N]) {
  std::uint16_t high[N];
  std::uint16_t low[N];
  load(static_cast<const std::uint16_t*>(span.param), i, high);
  load(static_cast<const std::uint16_t*>(span.low), i, low);
#pragma unroll
  for (unsigned k = 0; k < N; ++k) values[k] = joined(high[k], low[k]);
}

// split_fp32.
template <unsigned N>
__device__ inline void store_split(const float (&values)[N], const UpdateSpan& span,
                                   std::size_t i) {
  std::uint32_t high[N];
  std::uint32_t low[N];
#pragma unroll
  for (unsigned k = 0; k < N; ++k) {
    std::uint32_t bits = bits_of(values[k]);
    if (is_nan(values[k])) bits = (bits | 0x400000) & 0xFFFF0000;
    high[k] = bits + 0x8000;
    low[k] = bits << 16;
  }
  store_upper(high, span.param, i);
  store_upper(low, span.low, i);
}

// bf16_from_fp32_stochastic, in the upper half of a word.
__device__ inline std::uint32_t stochastic_word(float value, std::uint32_t random) {
  return is_nan(value) ? bits_of(value) | 0x400000 : bits_of(value) + random;
}

// State 0 or 1 in bf16, as the next step will read it.
template <unsigned N>
__device__ inline void store_stochastic(const float (&values)[N], const UpdateSpan& span, int state,
                                        std::size_t i) {
  std::uint32_t rounded[N];
#pragma unroll
  for (unsigned k = 0; k < N; ++k) {
    const auto number = span.first_element + static_cast<std::uint32_t>(i) + k;
    const std::uint32_t random = hash_bits(number ^ span.seed);
    rounded[k] = stochastic_word(values[k], state == 0 ? random & 0xFFFF : random >> 16);
  }
  store_upper(rounded, span.state[state], i);
}

}  // namespace semitone::kernels
