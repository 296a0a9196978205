#include "src/checkpoint/manifest.h"

#include "semitone/core/error.h"
#include "semitone/core/version.h"
#include "src/checkpoint/files.h"
#include "src/core/checksum.h"
#include "src/core/descriptor.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <limits>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

namespace semitone::checkpoint {
namespace {

// For reading. An ordered object compares a key that is added with all before it: one with
// millions of keys would take hours.
using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

constexpr auto kFormat = "semitone.checkpoint";
constexpr std::int64_t kVersion = 1;
constexpr std::uintmax_t kLargest = std::uintmax_t{64} << 20;
constexpr auto kSizeLimit = "at most 64 MiB";
constexpr auto kChecksum = "crc32";
constexpr auto kManifestComponent = "checkpoint.manifest";
constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
// A manifest has objects and lists six deep. Copying and writing a value takes a part of the
// program's stack for each level.
constexpr int kMaxNesting = 20;
// In a manifest of 64 MiB a value has a line. One takes up to some 150 bytes of memory.
constexpr std::int64_t kMaxValues = 8'000'000;

OrderedJson to_json(const FileRecord& record) {
  OrderedJson json{{"name", record.name}, {"kind", record.kind}};
  if (record.rank.has_value()) json["rank"] = *record.rank;
  json["file"] = file_name(record.name, record.rank);
  json["bytes"] = record.bytes;
  json["crc32"] = record.crc32;
  if (!record.level.empty()) json["level"] = record.level;
  if (record.tensors.empty()) return json;
  OrderedJson& tensors = json["tensors"] = OrderedJson::array();
  for (const TensorRecord& tensor : record.tensors)
    tensors.push_back({{"name", tensor.name}, {"shape", tensor.shape}, {"dtype", tensor.dtype}});
  return json;
}

// A number, within its limits: Json converts others to any number.
std::int64_t integer_in(const Json& json, const char* key, std::int64_t least, std::int64_t most) {
  const Json& value = json.at(key);
  const bool is_large =
      value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(most);
  if (!value.is_number_integer() || is_large || value.get<std::int64_t>() < least) {
    throw DamageError(kManifestComponent,
                      fmt::format("an integer from {} to {} for '{}'", least, most, key),
                      value.dump().substr(0, 100));
  }
  return value.get<std::int64_t>();
}

FileRecord record_from(const Json& json) {
  FileRecord record;
  json.at("name").get_to(record.name);
  if (!is_entry_name(record.name)) {
    throw DamageError(kManifestComponent, "the name of an entry",
                      fmt::format("'{}'", record.name.substr(0, 100)));
  }
  json.at("kind").get_to(record.kind);
  if (json.contains("rank"))
    record.rank = static_cast<int>(integer_in(json, "rank", 0, std::numeric_limits<int>::max()));
  record.bytes = static_cast<std::uint64_t>(integer_in(json, "bytes", 0, kMax));
  json.at("crc32").get_to(record.crc32);
  record.level = json.value("level", "");
  if (!json.contains("tensors")) return record;
  for (const Json& tensor : json.at("tensors")) {
    record.tensors.push_back({tensor.at("name").get<std::string>(),
                              tensor.at("shape").get<std::vector<std::int64_t>>(),
                              tensor.at("dtype").get<std::string>()});
  }
  return record;
}

OrderedJson to_json(const std::vector<FileRecord>& records) {
  OrderedJson files = OrderedJson::array();
  for (const FileRecord& record : records) files.push_back(to_json(record));
  return files;
}

std::vector<FileRecord> records_from(const Json& files) {
  std::vector<FileRecord> records;
  // A file that occurs a million times would be verified as often.
  std::set<std::pair<std::string, std::optional<int>>> seen;
  for (const Json& file : files) {
    records.push_back(record_from(file));
    const FileRecord& record = records.back();
    if (seen.emplace(record.name, record.rank).second) continue;
    throw DamageError(kManifestComponent, "each file once",
                      fmt::format("two of '{}'", record.name.substr(0, 100)));
  }
  return records;
}

// The last value is the checksum of the text without it.
std::string with_checksum(OrderedJson json) {
  const std::string checksum = checksum_of(json.dump(1));
  json[kChecksum] = checksum;
  return json.dump(1) + "\n";
}

bool has_its_checksum(std::string_view text, const std::string& checksum) {
  const std::string end = fmt::format(",\n \"{}\": \"{}\"\n}}\n", kChecksum, checksum);
  if (!text.ends_with(end)) return false;
  text.remove_suffix(end.size());
  Checksum found;
  found.add(text.data(), text.size());
  found.add("\n}", 2);
  return found.text() == checksum;
}

[[noreturn]] void refuse_manifest(const std::filesystem::path& path, std::string_view expected,
                                  std::string_view got) {
  throw DamageError(kManifestComponent, fmt::format("{} in '{}'", expected, path.string()), got);
}

// It may be whole.
[[noreturn]] void throw_unreadable(const std::filesystem::path& path, const std::string& reason) {
  throw FileError(kManifestComponent, fmt::format("to read '{}'", path.string()), reason);
}

std::string read_text(const std::filesystem::path& path) {
  std::error_code error;
  const std::uintmax_t bytes = std::filesystem::file_size(path, error);
  if (!error && !std::filesystem::is_regular_file(path))
    refuse_manifest(path, "a regular file", "something else");
  if (error == std::errc::no_such_file_or_directory || error == std::errc::is_a_directory)
    refuse_manifest(path, "a manifest", error.message());
  if (error) throw_unreadable(path, error.message());
  if (bytes > kLargest) refuse_manifest(path, kSizeLimit, fmt::format("{} bytes", bytes));
  std::string text(bytes, '\0');
  std::ifstream file(path, std::ios::binary);
  if (!file.read(text.data(), static_cast<std::streamsize>(bytes)))
    throw_unreadable(path, reason_of(errno));
  return text;
}

Json parse_json(const std::string& text) {
  std::int64_t values = 0;
  const auto check = [&](int depth, Json::parse_event_t event, const Json& /*value*/) {
    if (depth > kMaxNesting) {
      throw DamageError(kManifestComponent, fmt::format("values at most {} deep", kMaxNesting),
                        "deeper ones");
    }
    if (event != Json::parse_event_t::key && ++values > kMaxValues)
      throw DamageError(kManifestComponent, fmt::format("at most {} values", kMaxValues), "more");
    return true;
  };
  return Json::parse(text, check);
}

std::optional<double> metric_in(const Json& json) {
  if (!json.contains("metric")) return std::nullopt;
  const auto metric = json.at("metric").get<double>();
  if (!std::isfinite(metric))
    throw DamageError(kManifestComponent, "a finite 'metric'", json.at("metric").dump());
  return metric;
}

Manifest parse(const std::filesystem::path& path, const std::string& text) {
  const Json json = parse_json(text);
  if (json.value("format", "") != kFormat)
    refuse_manifest(path, "a manifest of Semitone", "another file");
  if (!has_its_checksum(text, json.value(kChecksum, "")))
    refuse_manifest(path, "the text that was written", "text that does not match its checksum");
  if (const auto version = integer_in(json, "version", 0, kMax); version != kVersion) {
    throw FileError(kManifestComponent, fmt::format("version {} in '{}'", kVersion, path.string()),
                    std::to_string(version),
                    "use the release of Semitone that wrote it, or a newer one");
  }
  return {integer_in(json, "step", 0, kMax), integer_in(json, "world_size", 1, kMax),
          json.value("settings", Settings()), records_from(json.at("files")), metric_in(json)};
}

}  // namespace

const FileRecord* Manifest::find(const std::string& name, const std::optional<int>& rank) const {
  for (const FileRecord& file : files) {
    if (file.name == name && file.rank == rank) return &file;
  }
  return nullptr;
}

std::string to_text(const Manifest& manifest) {
  OrderedJson json{{"format", kFormat},
                   {"version", kVersion},
                   {"step", manifest.step},
                   {"world_size", manifest.world_size},
                   {"semitone", semitone::version()},
                   {"libtorch", libtorch_version()},
                   {"settings", manifest.settings}};
  if (manifest.metric.has_value()) json["metric"] = *manifest.metric;
  json["files"] = to_json(manifest.files);
  std::string text = with_checksum(std::move(json));
  if (text.size() > kLargest) {
    throw Error(kManifestComponent, fmt::format("a manifest of {}", kSizeLimit),
                fmt::format("{} bytes", text.size()),
                "save fewer tensors with shorter names, and shorter settings");
  }
  return text;
}

std::string to_text(const std::vector<FileRecord>& records) {
  return to_json(records).dump();
}

std::vector<FileRecord> records_from(const std::string& text) {
  try {
    return records_from(parse_json(text));
  } catch (const Json::exception& error) {
    throw FileError(kManifestComponent, "a list of files", error.what());
  }
}

bool is_entry_name(std::string_view name) {
  const auto is_letter = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; };
  return !name.empty() && is_letter(name.front()) &&
         std::all_of(name.begin(), name.end(),
                     [&](char c) { return is_letter(c) || c == '_' || c == '-' || c == '.'; });
}

Manifest parse_manifest(const std::filesystem::path& path, const std::string& text) {
  try {
    return parse(path, text);
  } catch (const Json::exception& error) {
    refuse_manifest(path, "a manifest", error.what());
  }
}

Manifest read_manifest(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / kManifest;
  return parse_manifest(path, read_text(path));
}

}  // namespace semitone::checkpoint
