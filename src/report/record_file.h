#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

// Reading of what RunLog wrote. A FileError names the file and the line.
namespace semitone::report {

// The component in errors of PrecisionReport.
inline constexpr auto kPrecisionReport = "report.precision_report";

// A line of a file, for errors. Line 0: the file as a whole.
struct FilePlace {
  const std::filesystem::path& path;
  std::int64_t line = 0;

  [[noreturn]] void refuse(std::string_view expected, std::string_view got) const;
};

// The file run.json of a start: 1, 2, …
std::filesystem::path run_json_path(const std::filesystem::path& directory, int start);

// The whole content; nullopt if there is no such file. FileError if it cannot be read.
std::optional<std::string> read_record(const std::filesystem::path& path);

// Calls take with each line that has an end: a last one without may be in the middle of its write.
using TakeLine = std::function<void(std::string_view line, const FilePlace& place)>;
void for_each_line(const std::filesystem::path& path, std::string_view content,
                   const TakeLine& take);

using RecordJson = nlohmann::json;

// An object of JSON whose values are checked when they are read. A key that is left out has the
// fallback.
class RecordFields {
 public:
  // It must outlive this object.
  RecordFields(const RecordJson& object, const FilePlace& place);

  std::string text(const char* key) const;
  bool flag(const char* key) const;
  // An integer within limits.
  std::int64_t integer(const char* key, std::int64_t least, std::int64_t most,
                       std::int64_t fallback = 0) const;
  // A number of things: from 0 to 2^44, so that a sum over all lines of a file cannot overflow.
  std::int64_t count(const char* key) const;
  // A number that was not finite is NaN.
  std::optional<double> number(const char* key) const;
  // An amount from 0, also of seconds; 0 for what was not finite.
  double amount(const char* key) const;
  // The elements of a list of objects, or one member.
  void for_each(const char* key, const std::function<void(const RecordFields&)>& take) const;
  std::optional<RecordFields> object(const char* key) const;
  // A list, or an object of whatever; nullptr if there is none.
  const RecordJson* find(const char* key) const;

  const FilePlace& place() const { return place_; }

 private:
  [[noreturn]] void refuse(std::string_view expected, const char* key,
                           const RecordJson& value) const;

  const RecordJson& object_;
  FilePlace place_;
};

// Parses a text as one object. FileError for another text.
RecordJson parse_object(std::string_view text, const FilePlace& place);

}  // namespace semitone::report
