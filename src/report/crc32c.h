#pragma once

#include <cstdint>
#include <string_view>

namespace semitone::report {

// The CRC-32C of some bytes (Castagnoli's polynomial, as in RFC 3720, appendix B.4).
std::uint32_t crc32c(std::string_view bytes);

// The same as TensorFlow's records store it. A checksum over bytes that contain checksums would
// be weak, so the stored ones are rotated, and a constant is added.
std::uint32_t masked_crc32c(std::string_view bytes);

}  // namespace semitone::report
