#include "tests/report/events_file.h"

#include "src/report/crc32c.h"
#include "tests/support/temporary_folder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <iterator>
#include <stdexcept>

namespace semitone::report::test {
namespace {

std::uint64_t little_endian(std::string_view bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = bytes.size(); i-- > 0;)
    value = value << 8U | static_cast<unsigned char>(bytes[i]);
  return value;
}

// Takes bytes from the beginning.
std::string_view take(std::string_view& bytes, std::uint64_t count) {
  if (count > bytes.size()) throw std::runtime_error("a message that ends too early");
  const std::string_view taken = bytes.substr(0, count);
  bytes.remove_prefix(count);
  return taken;
}

std::uint64_t take_varint(std::string_view& bytes) {
  std::uint64_t value = 0;
  for (unsigned shift = 0; shift < 64; shift += 7) {
    const auto byte = static_cast<unsigned char>(take(bytes, 1).front());
    value |= static_cast<std::uint64_t>(byte & 0x7fU) << shift;
    if (byte < 0x80) return value;
  }
  throw std::runtime_error("a varint of more than 64 bits");
}

Event event_of(std::string_view bytes) {
  const Message message = Message::parse(bytes);
  Event event;
  event.time = message.real(1);
  if (message.numbers.contains(2))
    event.step = static_cast<std::int64_t>(message.numbers.at(2).front());
  event.file_version = message.text(3);
  event.is_restart = message.bytes.contains(7) &&
                     Message::parse(message.text(7)).numbers.at(1).front() == 1;  // START
  if (!message.bytes.contains(5)) return event;
  const Message value = Message::parse(Message::parse(message.text(5)).text(1));
  event.name = value.text(1);
  if (value.numbers.contains(2))
    event.scalar = std::bit_cast<float>(static_cast<std::uint32_t>(value.numbers.at(2).front()));
  if (value.bytes.contains(5)) {
    const Message histogram = Message::parse(value.text(5));
    event.histogram = {histogram.real(1), histogram.real(2),  histogram.real(3), histogram.real(4),
                       histogram.real(5), histogram.reals(6), histogram.reals(7)};
  }
  if (value.bytes.contains(8)) event.text = Message::parse(value.text(8)).text(8);
  if (value.bytes.contains(9))
    event.plugin = Message::parse(Message::parse(value.text(9)).text(1)).text(1);
  return event;
}

}  // namespace

Message Message::parse(std::string_view bytes) {
  Message message;
  while (!bytes.empty()) {
    const std::uint64_t key = take_varint(bytes);
    const std::uint64_t field = key >> 3U;
    switch (key & 7U) {
      case 0:
        message.numbers[field].push_back(take_varint(bytes));
        break;
      case 1:
        message.numbers[field].push_back(little_endian(take(bytes, 8)));
        break;
      case 2:
        message.bytes[field].emplace_back(take(bytes, take_varint(bytes)));
        break;
      case 5:
        message.numbers[field].push_back(little_endian(take(bytes, 4)));
        break;
      default:
        throw std::runtime_error("an unknown wire type");
    }
  }
  return message;
}

double Message::real(std::uint64_t field) const {
  return std::bit_cast<double>(numbers.at(field).front());
}

std::string Message::text(std::uint64_t field) const {
  const auto found = bytes.find(field);
  return found == bytes.end() ? "" : found->second.front();
}

std::vector<double> Message::reals(std::uint64_t field) const {
  const std::string packed = text(field);
  std::vector<double> values;
  for (std::size_t i = 0; i < packed.size(); i += sizeof(double))
    values.push_back(
        std::bit_cast<double>(little_endian(std::string_view(packed).substr(i, sizeof(double)))));
  return values;
}

std::vector<Event> Events::named(const std::string& name) const {
  std::vector<Event> found;
  std::copy_if(all.begin(), all.end(), std::back_inserter(found),
               [&](const Event& event) { return event.name == name; });
  return found;
}

Events read_events(const std::filesystem::path& path) {
  const std::string content = semitone::test::read_text(path);
  std::string_view bytes = content;
  Events events;
  while (bytes.size() >= 12) {
    const std::string_view length = bytes.substr(0, 8);
    EXPECT_EQ(little_endian(bytes.substr(8, 4)), masked_crc32c(length));
    const std::uint64_t size = little_endian(length);
    if (bytes.size() < size + 16) break;
    const std::string_view data = bytes.substr(12, size);
    EXPECT_EQ(little_endian(bytes.substr(12 + size, 4)), masked_crc32c(data));
    events.all.push_back(event_of(data));
    bytes.remove_prefix(size + 16);
  }
  events.is_cut_off = !bytes.empty();
  return events;
}

std::vector<std::filesystem::path> events_files(const std::filesystem::path& directory) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (entry.path().filename().string().starts_with("events.out.tfevents."))
      paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

}  // namespace semitone::report::test
