#include "src/core/checksum.h"

#include <fmt/format.h>
#include <zlib.h>

namespace semitone {

void Checksum::add(const void* data, std::size_t size) {
  // zlib takes no bytes at a null pointer, as an empty tensor has them, for the start of a stream.
  if (size == 0) return;
  value_ = static_cast<std::uint32_t>(::crc32_z(value_, static_cast<const Bytef*>(data), size));
}

std::string Checksum::text() const {
  return fmt::format("{:08x}", value_);
}

std::string checksum_of(std::string_view bytes) {
  Checksum checksum;
  checksum.add(bytes.data(), bytes.size());
  return checksum.text();
}

}  // namespace semitone
