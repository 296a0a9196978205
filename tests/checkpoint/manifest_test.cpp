#include "src/checkpoint/manifest.h"

#include "semitone/core/error.h"
#include "src/core/checksum.h"
#include "tests/support/errors.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <string>

namespace semitone::checkpoint::test {
namespace manifests {
namespace {

using Json = nlohmann::ordered_json;
using semitone::test::expect_error;

Json manifest() {
  const Manifest whole{3, 2, {}, {{"model", "module", std::nullopt, 12, "00000000", {}, ""}}, 0.1};
  Json json = Json::parse(to_text(whole));
  json.erase("crc32");
  return json;
}

// With the checksum that anybody can compute.
std::string signed_text(Json json) {
  json["crc32"] = checksum_of(json.dump(1));
  return json.dump(1) + "\n";
}

void expect_refused(const Json& json, std::string_view part) {
  expect_error([&] { parse_manifest("manifest.json", signed_text(json)); },
               {"[checkpoint.manifest]", part});
}

TEST(Manifest, IsReadAsItWasWritten) {
  const Manifest found = parse_manifest("manifest.json", signed_text(manifest()));
  EXPECT_EQ(found.step, 3);
  EXPECT_EQ(found.world_size, 2);
  EXPECT_EQ(found.metric, 0.1);
  ASSERT_NE(found.find("model", std::nullopt), nullptr);
  EXPECT_EQ(found.find("model", std::nullopt)->bytes, 12U);
}

TEST(Manifest, NamesNoFileOutsideOfItsDirectory) {
  for (const char* const name : {"../model", "/etc/passwd", "a/b", "", ".hidden"}) {
    Json json = manifest();
    json["files"][0]["name"] = name;
    expect_refused(json, "the name of an entry");
  }
}

TEST(Manifest, NamesEachFileOnce) {
  Json json = manifest();
  json["files"].push_back(json["files"][0]);
  expect_refused(json, "each file once");
  json["files"][1]["rank"] = 1;
  EXPECT_EQ(parse_manifest("manifest.json", signed_text(json)).files.size(), 2U);
}

TEST(Manifest, NumbersMustBeIntegersWithinTheirLimits) {
  const auto refused = [](const char* key, const Json& value) {
    Json json = manifest();
    json[key] = value;
    expect_refused(json, key);
  };
  refused("step", -1);
  refused("step", 1e300);
  refused("step", 18446744073709551615U);
  refused("world_size", 0);
  Json json = manifest();
  for (const Json& rank : {Json(-1), Json(1e300), Json(4294967296), Json("1")}) {
    json["files"][0]["rank"] = rank;
    expect_refused(json, "'rank'");
  }
  json = manifest();
  json["files"][0]["bytes"] = -1;
  expect_refused(json, "'bytes'");
}

TEST(Manifest, MetricsAreNumbersOrMissing) {
  Json json = manifest();
  for (const Json& metric : {Json("0.1"), Json(nullptr), Json::array({1})}) {
    json["metric"] = metric;
    expect_refused(json, "expected a manifest in");
  }
  json.erase("metric");
  EXPECT_EQ(parse_manifest("manifest.json", signed_text(json)).metric, std::nullopt);
}

// Each level takes a part of the stack where values are copied and written.
TEST(Manifest, DeepValuesAreRefused) {
  const std::string deep = std::string(1'000'000, '[') + std::string(1'000'000, ']');
  const std::string text =
      R"({"format":"semitone.checkpoint","version":1,"step":1,"world_size":1,"files":[],"a":)" +
      deep + "}";
  expect_error([&] { parse_manifest("manifest.json", text); }, {"values at most 20 deep"});
  expect_error([&] { records_from(deep); }, {"values at most 20 deep"});
  expect_error([] { records_from("[{}]"); }, {"[checkpoint.manifest]", "a list of files"});
}

// In an object that keeps the order of its keys, each of these would be compared with all before it:
// minutes, for a file that anybody may have written.
TEST(Manifest, ManyKeysAreReadInTimeOfTheirNumber) {
  Json json = manifest();
  json["many"] = 0;
  std::string text = signed_text(json);
  std::string many = "{";
  for (int i = 0; i < 500'000; ++i)
    many.append(i == 0 ? "\"" : ",\"").append(std::to_string(i)).append("\":0");
  const std::string place = "\"many\": 0";
  text.replace(text.find(place), place.size(), "\"many\": " + many + "}");
  expect_error([&] { parse_manifest("manifest.json", text); },
               {"text that does not match its checksum"});
}

TEST(Manifest, MoreValuesThanLinesOfTheLargestManifestAreRefused) {
  std::string text = "[0";
  for (int i = 0; i < 8'000'000; ++i) text.append(",0");
  expect_error([&] { records_from(text + "]"); }, {"at most 8000000 values"});
}

// The checksum is of all that precedes it, and nothing may follow it.
TEST(Manifest, OtherTextThanWhatWasWrittenIsRefused) {
  const std::string text = signed_text(manifest());
  parse_manifest("manifest.json", text);
  std::string larger = text;
  larger.replace(larger.find("\"step\": 3"), 9, "\"step\": 4");
  std::string longer = text;
  longer.insert(longer.rfind('}'), " ");
  for (const std::string& other : {larger, longer, text + " "}) {
    expect_error([&] { parse_manifest("manifest.json", other); },
                 {"text that does not match its checksum"});
  }
}

}  // namespace
}  // namespace manifests
}  // namespace semitone::checkpoint::test
