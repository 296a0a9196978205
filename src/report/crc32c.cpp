#include "src/report/crc32c.h"

#include <array>
#include <bit>
#include <cstddef>

namespace semitone::report {
namespace {

// One table for each of the four bytes that are read at once.
constexpr std::size_t kBytes = 4;
using Tables = std::array<std::array<std::uint32_t, 256>, kBytes>;

constexpr Tables make_tables() {
  constexpr std::uint32_t kReversedPolynomial = 0x82f63b78;
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit)
      value = (value >> 1U) ^ ((value & 1U) != 0 ? kReversedPolynomial : 0);
    tables[0][byte] = value;
  }
  for (std::size_t table = 1; table < kBytes; ++table) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[table - 1][byte];
      tables[table][byte] = (before >> 8U) ^ tables[0][before & 0xffU];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

std::uint32_t byte_at(std::string_view bytes, std::size_t i) {
  return static_cast<unsigned char>(bytes[i]);
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t value = ~std::uint32_t{0};
  std::size_t i = 0;
  for (; i + kBytes <= bytes.size(); i += kBytes) {
    value ^= byte_at(bytes, i) | byte_at(bytes, i + 1) << 8U | byte_at(bytes, i + 2) << 16U |
             byte_at(bytes, i + 3) << 24U;
    value = kTables[3][value & 0xffU] ^ kTables[2][(value >> 8U) & 0xffU] ^
            kTables[1][(value >> 16U) & 0xffU] ^ kTables[0][value >> 24U];
  }
  for (; i < bytes.size(); ++i)
    value = (value >> 8U) ^ kTables[0][(value ^ byte_at(bytes, i)) & 0xffU];
  return ~value;
}

std::uint32_t masked_crc32c(std::string_view bytes) {
  constexpr std::uint32_t kMask = 0xa282ead8;
  return std::rotr(crc32c(bytes), 15) + kMask;
}

}  // namespace semitone::report
