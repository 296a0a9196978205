#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace semitone::report {

// Builds a message in protobuf's wire format (protobuf.dev/programming-guides/encoding).
//
// TensorBoard's messages need a varint, two kinds of floating-point numbers, and bytes. Linking
// protobuf for them would clash: LibTorch contains a protobuf of its own, whose symbols a program
// with another release of protobuf would mix up with that one's.
class ProtobufMessage {
 public:
  ProtobufMessage& add_integer(std::uint32_t field, std::int64_t value);
  ProtobufMessage& add_double(std::uint32_t field, double value);
  ProtobufMessage& add_float(std::uint32_t field, float value);
  ProtobufMessage& add_bytes(std::uint32_t field, std::string_view value);
  ProtobufMessage& add_message(std::uint32_t field, const ProtobufMessage& value);
  // As `repeated double … [packed = true]`.
  ProtobufMessage& add_doubles(std::uint32_t field, std::span<const double> values);

  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// Appends the lowest bytes of a number, the lowest first.
void append_little_endian(std::string& bytes, std::uint64_t value, int count);

}  // namespace semitone::report
