#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// Reads TensorBoard's files.
namespace semitone::report::test {

// The fields of a protobuf message, by their numbers: varints and fixed numbers as their bits,
// others as their bytes.
struct Message {
  std::map<std::uint64_t, std::vector<std::uint64_t>> numbers;
  std::map<std::uint64_t, std::vector<std::string>> bytes;

  // Throws std::runtime_error for what is no message.
  static Message parse(std::string_view bytes);

  double real(std::uint64_t field) const;
  std::string text(std::uint64_t field) const;           // "" if there is none
  std::vector<double> reals(std::uint64_t field) const;  // packed
};

struct HistogramValue {
  double min, max, num, sum, sum_squares;
  std::vector<double> limits, counts;
};

// A record.
struct Event {
  double time = 0;
  std::int64_t step = 0;
  std::string file_version;
  bool is_restart = false;
  std::string name;
  std::string plugin;
  std::optional<float> scalar;
  std::optional<std::string> text;
  std::optional<HistogramValue> histogram;
};

// The whole records of a file, and whether a part of another one follows them. A wrong checksum
// fails the test.
struct Events {
  std::vector<Event> all;
  bool is_cut_off = false;

  // Those with this name.
  std::vector<Event> named(const std::string& name) const;
};

Events read_events(const std::filesystem::path& path);

// The files of events in a directory, the oldest first.
std::vector<std::filesystem::path> events_files(const std::filesystem::path& directory);

}  // namespace semitone::report::test
