#pragma once

#include <array>
#include <cstdint>

// Philox4x32, a counter-based generator of random bits. It computes block number `counter` of the
// sequence that `key` selects, without the blocks before it. J. K. Salmon, M. A. Moraes, R. O.
// Dror, D. E. Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC11.
namespace semitone::kernels {

// With seven rounds it passes SmallCrush, Crush and BigCrush, as its authors report; their default
// of ten is a margin for simulations.
constexpr int kPhiloxRounds = 7;

// These are numbers rather than arrays: an array at namespace scope is a host variable, and nvcc
// compiles device code that reads one to a trap, without a warning.
constexpr std::uint32_t kPhiloxMultiplier0 = 0xD2511F53;
constexpr std::uint32_t kPhiloxMultiplier1 = 0xCD9E8D57;
// The increments of the key from round to round: the golden ratio and the square root of 3, minus
// 1.
constexpr std::uint32_t kPhiloxWeyl0 = 0x9E3779B9;
constexpr std::uint32_t kPhiloxWeyl1 = 0xBB67AE85;

using PhiloxBlock = std::array<std::uint32_t, 4>;
using PhiloxKey = std::array<std::uint32_t, 2>;

// A sequence of blocks.
struct PhiloxStream {
  std::uint64_t seed;        // the key
  std::uint64_t offset = 0;  // upper half of the counter; the lower is the number of the block
};

constexpr PhiloxKey key_of(const PhiloxStream& stream) {
  return {static_cast<std::uint32_t>(stream.seed), static_cast<std::uint32_t>(stream.seed >> 32)};
}

constexpr PhiloxBlock counter_of(const PhiloxStream& stream, std::uint64_t block) {
  return {static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32),
          static_cast<std::uint32_t>(stream.offset),
          static_cast<std::uint32_t>(stream.offset >> 32)};
}

// The upper and the lower half of the product.
struct WideProduct {
  std::uint32_t upper;
  std::uint32_t lower;
};
constexpr WideProduct wide_product(std::uint32_t a, std::uint32_t b) {
#ifdef __CUDA_ARCH__
  // Of a product of 64-bit numbers, nvcc adds the upper halves, which are 0.
  return {__umulhi(a, b), a * b};
#else
  const auto product = std::uint64_t{a} * b;
  return {static_cast<std::uint32_t>(product >> 32), static_cast<std::uint32_t>(product)};
#endif
}

constexpr PhiloxBlock philox(PhiloxBlock counter, PhiloxKey key, int rounds = kPhiloxRounds) {
  for (int round = 0; round < rounds; ++round) {
    const WideProduct first = wide_product(kPhiloxMultiplier0, counter[0]);
    const WideProduct second = wide_product(kPhiloxMultiplier1, counter[2]);
    counter = {second.upper ^ counter[1] ^ key[0], second.lower, first.upper ^ counter[3] ^ key[1],
               first.lower};
    key = {key[0] + kPhiloxWeyl0, key[1] + kPhiloxWeyl1};
  }
  return counter;
}

}  // namespace semitone::kernels
