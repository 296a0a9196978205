#include "src/report/tensorboard_events.h"

#include "src/core/host_name.h"
#include "src/report/crc32c.h"
#include "src/report/protobuf.h"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <limits>

namespace semitone::report {
namespace {

// The numbers of the fields in TensorBoard's .proto files.
namespace fields {

namespace event {
enum Field : std::uint32_t { wall_time = 1, step = 2, file_version = 3, summary = 5, session = 7 };
}
namespace session {
enum Field : std::uint32_t { status = 1 };
}
namespace summary {
enum Field : std::uint32_t { value = 1 };
}
namespace value {
enum Field : std::uint32_t { tag = 1, simple_value = 2, histo = 5, tensor = 8, metadata = 9 };
}
namespace histo {
enum Field : std::uint32_t { min = 1, max, num, sum, sum_squares, bucket_limit, bucket };
}
namespace metadata {
enum Field : std::uint32_t { plugin_data = 1 };
}
namespace plugin_data {
enum Field : std::uint32_t { plugin_name = 1 };
}
namespace tensor {
enum Field : std::uint32_t { dtype = 1, shape = 2, string_val = 8 };
}
namespace shape {
enum Field : std::uint32_t { dim = 2 };
}
namespace dim {
enum Field : std::uint32_t { size = 1 };
}

}  // namespace fields

constexpr std::int64_t kSessionStart = 1;  // SessionLog.START
constexpr std::int64_t kString = 7;        // DT_STRING

// Length, checksum of the length, data, checksum of the data.
std::string framed(const ProtobufMessage& message) {
  constexpr int kLengthBytes = 8;
  constexpr int kChecksumBytes = 4;
  const std::string& data = message.bytes();
  std::string record;
  append_little_endian(record, data.size(), kLengthBytes);
  append_little_endian(record, masked_crc32c(record), kChecksumBytes);
  record += data;
  append_little_endian(record, masked_crc32c(data), kChecksumBytes);
  return record;
}

ProtobufMessage event_at(const Moment& when) {
  ProtobufMessage message;
  message.add_double(fields::event::wall_time, when.time)
      .add_integer(fields::event::step, when.step);
  return message;
}

std::string summary_record(const Moment& when, const ProtobufMessage& value) {
  return framed(event_at(when).add_message(
      fields::event::summary, ProtobufMessage().add_message(fields::summary::value, value)));
}

// C++ does not define the conversion of a double beyond float's range.
float to_float(double value) {
  constexpr auto kMax = static_cast<double>(std::numeric_limits<float>::max());
  if (std::isfinite(value) && std::abs(value) > kMax)
    return std::copysign(std::numeric_limits<float>::infinity(), value > 0 ? 1.0F : -1.0F);
  return static_cast<float>(value);
}

}  // namespace

std::string events_file_name(double time) {
  static std::atomic<int> count = 0;
  return fmt::format("events.out.tfevents.{:010}.{}.{}.{}", static_cast<std::int64_t>(time),
                     host_name(), ::getpid(), count++);
}

std::string file_version_record(double time) {
  ProtobufMessage message;
  message.add_double(fields::event::wall_time, time)
      .add_bytes(fields::event::file_version, "brain.Event:2");
  return framed(message);
}

std::string restart_record(const Moment& when) {
  return framed(event_at(when).add_message(
      fields::event::session,
      ProtobufMessage().add_integer(fields::session::status, kSessionStart)));
}

std::string scalar_record(const Moment& when, std::string_view name, double number) {
  return summary_record(when, ProtobufMessage()
                                  .add_bytes(fields::value::tag, name)
                                  .add_float(fields::value::simple_value, to_float(number)));
}

std::string text_record(const Moment& when, std::string_view name, std::string_view text) {
  const auto plugin = ProtobufMessage().add_bytes(fields::plugin_data::plugin_name, "text");
  const auto one = ProtobufMessage().add_message(
      fields::shape::dim, ProtobufMessage().add_integer(fields::dim::size, 1));
  const auto content = ProtobufMessage()
                           .add_integer(fields::tensor::dtype, kString)
                           .add_message(fields::tensor::shape, one)
                           .add_bytes(fields::tensor::string_val, text);
  // PyTorch's tag for a text.
  return summary_record(
      when, ProtobufMessage()
                .add_bytes(fields::value::tag, fmt::format("{}/text_summary", name))
                .add_message(fields::value::tensor, content)
                .add_message(fields::value::metadata,
                             ProtobufMessage().add_message(fields::metadata::plugin_data, plugin)));
}

std::string histogram_record(const Moment& when, std::string_view name, const Histogram& values) {
  const auto content = ProtobufMessage()
                           .add_double(fields::histo::min, values.min)
                           .add_double(fields::histo::max, values.max)
                           .add_double(fields::histo::num, values.num)
                           .add_double(fields::histo::sum, values.sum)
                           .add_double(fields::histo::sum_squares, values.sum_squares)
                           .add_doubles(fields::histo::bucket_limit, values.limits)
                           .add_doubles(fields::histo::bucket, values.counts);
  return summary_record(when, ProtobufMessage()
                                  .add_bytes(fields::value::tag, name)
                                  .add_message(fields::value::histo, content));
}

}  // namespace semitone::report
