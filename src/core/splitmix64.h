#pragma once

#include <cstdint>

namespace semitone {

// The second half of splitmix64 (Steele, Lea, Flood 2014): each bit changes about half of the others.
inline std::uint64_t mix_bits(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
  return value ^ (value >> 31);
}

// Gives neighbouring numbers unrelated ones. The same on every machine.
inline std::uint64_t splitmix64(std::uint64_t value) {
  return mix_bits(value + 0x9E3779B97F4A7C15U);
}

}  // namespace semitone
