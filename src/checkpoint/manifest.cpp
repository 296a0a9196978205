#include "src/checkpoint/manifest.h"

#include "semitone/core/error.h"
#include "semitone/core/version.h"
#include "src/checkpoint/checksum.h"
#include "src/core/descriptor.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cerrno>
#include <fstream>
#include <string_view>
#include <system_error>
#include <utility>

namespace semitone::checkpoint {
namespace {

using Json = nlohmann::ordered_json;

constexpr auto kFormat = "semitone.checkpoint";
constexpr std::int64_t kVersion = 1;
constexpr std::uintmax_t kLargest = std::uintmax_t{64} << 20;
constexpr auto kChecksum = "crc32";

Json to_json(const FileRecord& record) {
  Json json{{"name", record.name}, {"kind", record.kind}};
  if (record.rank.has_value()) json["rank"] = *record.rank;
  json["file"] = file_name(record.name, record.rank);
  json["bytes"] = record.bytes;
  json["crc32"] = record.crc32;
  if (!record.level.empty()) json["level"] = record.level;
  if (record.tensors.empty()) return json;
  Json& tensors = json["tensors"] = Json::array();
  for (const TensorRecord& tensor : record.tensors)
    tensors.push_back({{"name", tensor.name}, {"shape", tensor.shape}, {"dtype", tensor.dtype}});
  return json;
}

FileRecord record_from(const Json& json) {
  FileRecord record;
  json.at("name").get_to(record.name);
  json.at("kind").get_to(record.kind);
  if (json.contains("rank")) record.rank = json.at("rank").get<int>();
  json.at("bytes").get_to(record.bytes);
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

Json to_json(const std::vector<FileRecord>& records) {
  Json files = Json::array();
  for (const FileRecord& record : records) files.push_back(to_json(record));
  return files;
}

std::vector<FileRecord> records_from(const Json& files) {
  std::vector<FileRecord> records;
  for (const Json& file : files) records.push_back(record_from(file));
  return records;
}

// The last value is the checksum of the text without it.
std::string with_checksum(Json json) {
  const std::string checksum = checksum_of(json.dump(1));
  json[kChecksum] = checksum;
  return json.dump(1) + "\n";
}

[[noreturn]] void refuse_manifest(const std::filesystem::path& path, std::string_view expected,
                                  std::string_view got) {
  throw DamageError("checkpoint.manifest", fmt::format("{} in '{}'", expected, path.string()), got);
}

std::string read_text(const std::filesystem::path& path) {
  std::error_code error;
  const std::uintmax_t bytes = std::filesystem::file_size(path, error);
  if (error) refuse_manifest(path, "a manifest", error.message());
  if (bytes > kLargest) refuse_manifest(path, "at most 64 MiB", fmt::format("{} bytes", bytes));
  std::string text(bytes, '\0');
  std::ifstream file(path, std::ios::binary);
  if (!file.read(text.data(), static_cast<std::streamsize>(bytes)))
    refuse_manifest(path, "a manifest", reason_of(errno));
  return text;
}

Manifest parse(const std::filesystem::path& path, const std::string& text) {
  Json json = Json::parse(text);
  if (json.value("format", "") != kFormat)
    refuse_manifest(path, "a manifest of Semitone", "another file");
  json.erase(kChecksum);
  if (with_checksum(json) != text)
    refuse_manifest(path, "the text that was written", "text that does not match its checksum");
  if (const auto version = json.at("version").get<std::int64_t>(); version != kVersion) {
    throw FileError(
        "checkpoint.manifest", fmt::format("version {} in '{}'", kVersion, path.string()),
        std::to_string(version), "use the release of Semitone that wrote it, or a newer one");
  }
  return {json.at("step").get<std::int64_t>(), json.at("world_size").get<std::int64_t>(),
          json.value("settings", Settings()), records_from(json.at("files"))};
}

}  // namespace

const FileRecord* Manifest::find(const std::string& name, const std::optional<int>& rank) const {
  for (const FileRecord& file : files) {
    if (file.name == name && file.rank == rank) return &file;
  }
  return nullptr;
}

std::string to_text(const Manifest& manifest) {
  return with_checksum({{"format", kFormat},
                        {"version", kVersion},
                        {"step", manifest.step},
                        {"world_size", manifest.world_size},
                        {"semitone", semitone::version()},
                        {"libtorch", libtorch_version()},
                        {"settings", manifest.settings},
                        {"files", to_json(manifest.files)}});
}

std::string to_text(const std::vector<FileRecord>& records) {
  return to_json(records).dump();
}

std::vector<FileRecord> records_from(const std::string& text) {
  return records_from(Json::parse(text));
}

Manifest read_manifest(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / kManifest;
  const std::string text = read_text(path);
  try {
    return parse(path, text);
  } catch (const Json::exception& error) {
    refuse_manifest(path, "a manifest", error.what());
  }
}

}  // namespace semitone::checkpoint
