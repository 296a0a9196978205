#pragma once

#include "tests/report/events_file.h"
#include "tests/support/temporary_folder.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

// The content of a run's directory.
namespace semitone::report::test {

// The lines of a file, without the ends of lines. A last line that is not complete fails the test.
inline std::vector<std::string> lines_of(const std::filesystem::path& path) {
  const std::string text = semitone::test::read_text(path);
  EXPECT_TRUE(text.empty() || text.back() == '\n') << path;
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// The lines of metrics.csv without the header and the column of the time: "7,loss,0.5".
inline std::vector<std::string> metrics_in(const std::filesystem::path& directory) {
  std::vector<std::string> lines = lines_of(directory / "metrics.csv");
  EXPECT_FALSE(lines.empty());
  EXPECT_EQ(lines.front(), "step,wall_time,name,value");
  lines.erase(lines.begin());
  for (std::string& line : lines) {
    const auto first = line.find(',');
    line.erase(first, line.find(',', first + 1) - first);
  }
  return lines;
}

// The lines of texts.jsonl as "7 note: text".
inline std::vector<std::string> texts_in(const std::filesystem::path& directory) {
  std::vector<std::string> texts;
  for (const std::string& line : lines_of(directory / "texts.jsonl")) {
    const auto json = nlohmann::json::parse(line);
    texts.push_back(std::to_string(json.at("step").get<int>()) + " " +
                    json.at("name").get<std::string>() + ": " + json.at("text").get<std::string>());
  }
  return texts;
}

// The lines of samples.jsonl, without their times.
inline std::vector<nlohmann::json> samples_in(const std::filesystem::path& directory) {
  std::vector<nlohmann::json> samples;
  for (const std::string& line : lines_of(directory / "samples.jsonl")) {
    samples.push_back(nlohmann::json::parse(line));
    EXPECT_GT(samples.back().at("wall_time").get<double>(), 1e9);
    samples.back().erase("wall_time");
  }
  return samples;
}

inline nlohmann::json json_in(const std::filesystem::path& path) {
  return nlohmann::json::parse(semitone::test::read_text(path));
}

// The only file of events.
inline Events events_in(const std::filesystem::path& directory) {
  const auto files = events_files(directory);
  EXPECT_EQ(files.size(), 1U);
  return files.empty() ? Events() : read_events(files.front());
}

}  // namespace semitone::report::test
