#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <sstream>
#include <string>

// What a training that was killed has left: its output, and its directory of checkpoints.
namespace semitone::test {

// The last number after a word in the output of a process; -1 if there is none.
inline std::int64_t last_number(const std::string& output, const std::string& word) {
  std::int64_t last = -1;
  std::istringstream words(output);
  for (std::string text; words >> text;) {
    if (text == word) words >> last;
  }
  return last;
}

// Checkpoints that were being written, or deleted.
inline std::int64_t partial_directories(const std::filesystem::path& folder) {
  namespace fs = std::filesystem;
  if (!fs::exists(folder)) return 0;
  return std::count_if(fs::directory_iterator(folder), fs::directory_iterator(),
                       [](const auto& entry) { return entry.path().extension() == ".partial"; });
}

}  // namespace semitone::test
