#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace semitone {

// The CRC-32 of a stream (zlib's, as in gzip and PNG). It finds every burst of errors of up to 32
// bits, and overlooks other damage with a probability of 2^-32. It is no protection against
// intentional changes.
class Checksum {
 public:
  void add(const void* data, std::size_t size);
  // In hexadecimal, 8 digits.
  std::string text() const;

 private:
  std::uint32_t value_ = 0;  // of no bytes
};

std::string checksum_of(std::string_view bytes);

}  // namespace semitone
