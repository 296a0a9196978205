#include "src/report/protobuf.h"

#include <bit>

namespace semitone::report {
namespace {

enum WireType : std::uint32_t { kVarint = 0, kFixed64 = 1, kLength = 2, kFixed32 = 5 };

void append_varint(std::string& bytes, std::uint64_t value) {
  constexpr std::uint64_t kMore = 0x80;
  for (; value >= kMore; value >>= 7U) bytes += static_cast<char>((value & 0x7fU) | kMore);
  bytes += static_cast<char>(value);
}

void append_key(std::string& bytes, std::uint32_t field, WireType type) {
  append_varint(bytes, field << 3U | type);
}

}  // namespace

void append_little_endian(std::string& bytes, std::uint64_t value, int count) {
  for (int i = 0; i < count; ++i, value >>= 8U) bytes += static_cast<char>(value & 0xffU);
}

ProtobufMessage& ProtobufMessage::add_integer(std::uint32_t field, std::int64_t value) {
  append_key(bytes_, field, kVarint);
  append_varint(bytes_, static_cast<std::uint64_t>(value));
  return *this;
}

ProtobufMessage& ProtobufMessage::add_double(std::uint32_t field, double value) {
  append_key(bytes_, field, kFixed64);
  append_little_endian(bytes_, std::bit_cast<std::uint64_t>(value), sizeof value);
  return *this;
}

ProtobufMessage& ProtobufMessage::add_float(std::uint32_t field, float value) {
  append_key(bytes_, field, kFixed32);
  append_little_endian(bytes_, std::bit_cast<std::uint32_t>(value), sizeof value);
  return *this;
}

ProtobufMessage& ProtobufMessage::add_bytes(std::uint32_t field, std::string_view value) {
  append_key(bytes_, field, kLength);
  append_varint(bytes_, value.size());
  bytes_ += value;
  return *this;
}

ProtobufMessage& ProtobufMessage::add_message(std::uint32_t field, const ProtobufMessage& value) {
  return add_bytes(field, value.bytes());
}

ProtobufMessage& ProtobufMessage::add_doubles(std::uint32_t field, std::span<const double> values) {
  append_key(bytes_, field, kLength);
  append_varint(bytes_, values.size() * sizeof(double));
  for (const double value : values)
    append_little_endian(bytes_, std::bit_cast<std::uint64_t>(value), sizeof value);
  return *this;
}

}  // namespace semitone::report
