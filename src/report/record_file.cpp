#include "src/report/record_file.h"

#include "semitone/core/error.h"
#include "src/core/descriptor.h"

#include <fmt/format.h>

#include <cerrno>
#include <cmath>
#include <fstream>
#include <iterator>
#include <system_error>

namespace semitone::report {
namespace {

constexpr std::int64_t kMostThings = std::int64_t{1} << 44;
// Records are six deep.
constexpr int kMostNesting = 20;

}  // namespace

void FilePlace::refuse(std::string_view expected, std::string_view got) const {
  const std::string in = line == 0 ? fmt::format("in '{}'", path.string())
                                   : fmt::format("in line {} of '{}'", line, path.string());
  throw FileError(kPrecisionReport, fmt::format("{} {}", expected, in), got,
                  line == 0 ? "restore the file, or move it away: the report then lacks its part"
                            : "restore the line, or remove it: the report then lacks its values");
}

std::filesystem::path run_json_path(const std::filesystem::path& directory, int start) {
  return directory / (start == 1 ? std::string("run.json") : fmt::format("run-{}.json", start));
}

std::optional<std::string> read_record(const std::filesystem::path& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) return std::nullopt;
  const auto fail = [&](const std::string& reason) {
    throw FileError(kPrecisionReport, fmt::format("to read '{}'", path.string()), reason);
  };
  if (error) fail(error.message());
  if (!std::filesystem::is_regular_file(status)) fail("something that is not a regular file");
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(reason_of(errno));
  std::string content(std::istreambuf_iterator<char>(file), {});
  if (file.bad()) fail(reason_of(errno));
  return content;
}

void for_each_line(const std::filesystem::path& path, std::string_view content,
                   const TakeLine& take) {
  std::int64_t number = 0;
  for (std::size_t end = content.find('\n'); end != content.npos; end = content.find('\n')) {
    take(content.substr(0, end), {path, ++number});
    content.remove_prefix(end + 1);
  }
}

RecordJson parse_object(std::string_view text, const FilePlace& place) {
  const auto check = [&](int depth, RecordJson::parse_event_t /*event*/,
                         const RecordJson& /*value*/) {
    if (depth > kMostNesting) place.refuse("values at most 20 deep", "deeper ones");
    return true;
  };
  try {
    auto json = RecordJson::parse(text, check);
    if (!json.is_object()) place.refuse("a JSON object", json.type_name());
    return json;
  } catch (const RecordJson::exception& error) {
    place.refuse("a JSON object", error.what());
  }
}

RecordFields::RecordFields(const RecordJson& object, const FilePlace& place)
    : object_(object), place_(place) {
  if (!object.is_object()) place.refuse("an object", object.type_name());
}

void RecordFields::refuse(std::string_view expected, const char* key,
                          const RecordJson& value) const {
  constexpr std::size_t kMost = 60;
  std::string got = value.dump(-1, ' ', false, RecordJson::error_handler_t::replace);
  if (got.size() > kMost) got = got.substr(0, kMost) + "…";
  place_.refuse(fmt::format("{} for '{}'", expected, key), got);
}

const RecordJson* RecordFields::find(const char* key) const {
  const auto found = object_.find(key);
  return found == object_.end() ? nullptr : &*found;
}

std::string RecordFields::text(const char* key) const {
  const RecordJson* const value = find(key);
  if (value == nullptr || value->is_null()) return {};
  if (!value->is_string()) refuse("a text", key, *value);
  return value->get<std::string>();
}

bool RecordFields::flag(const char* key) const {
  const RecordJson* const value = find(key);
  if (value == nullptr) return false;
  if (!value->is_boolean()) refuse("true or false", key, *value);
  return value->get<bool>();
}

std::int64_t RecordFields::integer(const char* key, std::int64_t least, std::int64_t most,
                                   std::int64_t fallback) const {
  const RecordJson* const value = find(key);
  if (value == nullptr) return fallback;
  // A conversion would accept any number.
  const bool is_large =
      value->is_number_unsigned() && value->get<std::uint64_t>() > static_cast<std::uint64_t>(most);
  if (!value->is_number_integer() || is_large || value->get<std::int64_t>() < least ||
      value->get<std::int64_t>() > most)
    refuse(fmt::format("an integer from {} to {}", least, most), key, *value);
  return value->get<std::int64_t>();
}

std::int64_t RecordFields::count(const char* key) const {
  return integer(key, 0, kMostThings);
}

std::optional<double> RecordFields::number(const char* key) const {
  const RecordJson* const value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->is_null()) return std::nan("");
  if (!value->is_number()) refuse("a number", key, *value);
  return value->get<double>();
}

double RecordFields::amount(const char* key) const {
  const double value = number(key).value_or(0);
  if (value < 0) refuse("a number from 0", key, *find(key));
  return std::isfinite(value) ? value : 0;
}

void RecordFields::for_each(const char* key,
                            const std::function<void(const RecordFields&)>& take) const {
  const RecordJson* const list = find(key);
  if (list == nullptr) return;
  if (!list->is_array()) refuse("a list", key, *list);
  for (const RecordJson& element : *list) take(RecordFields(element, place_));
}

std::optional<RecordFields> RecordFields::object(const char* key) const {
  const RecordJson* const value = find(key);
  if (value == nullptr) return std::nullopt;
  return RecordFields(*value, place_);
}

}  // namespace semitone::report
