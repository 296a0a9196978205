#pragma once

#include <bit>
#include <cstdint>

// Rounding to and from the 16-bit formats, one number at a time, on bit patterns. It defines the
// results of the vector code, and processors without conversion instructions run it. Rounds to
// nearest, ties to even; subnormals are kept; overflow gives infinity; a NaN stays a NaN, made
// quiet, with the sign and the upper payload bits kept.
namespace semitone::kernels {

constexpr std::uint16_t bf16_from_fp32(std::uint32_t bits) {
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
  const std::uint32_t lowest_kept = (bits >> 16) & 1;
  return static_cast<std::uint16_t>((bits + 0x7FFF + lowest_kept) >> 16);
}

constexpr std::uint32_t fp32_from_bf16(std::uint16_t bits) {
  return static_cast<std::uint32_t>(bits) << 16;
}

constexpr std::uint16_t fp16_from_fp32(std::uint32_t bits) {
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000);
  const std::uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) {  // NaN
    return static_cast<std::uint16_t>(sign | 0x7E00 | ((magnitude >> 13) & 0x1FF));
  }
  if (magnitude >= 0x477FF000)
    return sign | 0x7C00;         // from 65520 on, the tie above 65504, all rounds to infinity
  if (magnitude >= 0x38800000) {  // normal in fp16: from 2^-14
    const std::uint32_t lowest_kept = (magnitude >> 13) & 1;
    const std::uint32_t rounded = magnitude + 0xFFF + lowest_kept - (112U << 23);
    return static_cast<std::uint16_t>(sign | (rounded >> 13));
  }
  // Subnormal in fp16. Adding 0.5 places the unit 2^-24 at the lowest bit of the sum's significand,
  // so that the addition itself rounds correctly.
  const float sum = std::bit_cast<float>(magnitude) + 0.5F;
  return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(sum) - 0x3F000000));
}

constexpr std::uint32_t fp32_from_fp16(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1F;
  const std::uint32_t mantissa = bits & 0x3FF;
  if (exponent == 0x1F) return sign | 0x7F800000 | (mantissa << 13);
  if (exponent != 0) return sign | ((exponent + 112) << 23) | (mantissa << 13);
  return sign | std::bit_cast<std::uint32_t>(static_cast<float>(mantissa) * 0x1p-24F);
}

// Split masters: an fp32 number as a bf16 number and 16 more bits. The upper half is the number
// rounded to nearest, so that it can serve as the number itself. Ties go away from zero: then the
// lower half is just the low 16 bits, read as a signed distance from the upper half, and joining is
// one addition. (With ties to even, 0x8000 could mean half a unit above an even upper half or below
// it.) Every number except NaN is restored bit for bit; a NaN stays a NaN. An upper half that other
// code has written is changed by at most half its unit. A lower half that would make a zero
// negative, which splitting never produces, is ignored.
struct SplitFp32 {
  std::uint16_t high;  // bf16
  std::uint16_t low;
};

constexpr SplitFp32 split_fp32(std::uint32_t bits) {
  // 0x8000 added to a NaN could carry into the sign.
  if ((bits & 0x7FFFFFFF) > 0x7F800000) bits = (bits | 0x400000) & 0xFFFF0000;
  return {static_cast<std::uint16_t>((bits + 0x8000) >> 16), static_cast<std::uint16_t>(bits)};
}

constexpr std::uint32_t join_fp32(SplitFp32 split) {
  const std::uint32_t borrow = split.low >> 15;
  if (borrow == 1 && (split.high & 0x7FFF) == 0) return fp32_from_bf16(split.high);
  return ((split.high - borrow) << 16) | split.low;
}

// Stochastic rounding (Gupta et al. 2015): down or up, with probabilities such that the expected
// result is the number itself, and sums of small steps are not lost. `random` has 16 uniformly
// distributed bits. Numbers that bf16 represents are unchanged; a NaN is made quiet.
constexpr std::uint16_t bf16_from_fp32_stochastic(std::uint32_t bits, std::uint16_t random) {
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
  return static_cast<std::uint16_t>((bits + random) >> 16);
}

// A bijection whose results look random: the last step of MurmurHash3 (Austin Appleby, public
// domain). It takes 10 vector instructions, whereas a cipher such as Philox would take more time
// than an optimizer waits for its memory.
constexpr std::uint32_t hash_bits(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6B;
  x = (x ^ (x >> 13)) * 0xC2B2AE35;
  return x ^ (x >> 16);
}

}  // namespace semitone::kernels
