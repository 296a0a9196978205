#include "tests/support/processes.h"

#include <chrono>
#include <fstream>
#include <thread>

namespace semitone::test {

bool is_running(pid_t id) {
  std::ifstream stat("/proc/" + std::to_string(id) + "/stat");
  std::string line;
  if (!std::getline(stat, line)) return false;
  // "17 (name) S …", and a name may have anything in it.
  const auto state = line.rfind(')') + 2;
  return state < line.size() && line[state] != 'Z' && line[state] != 'X';
}

bool eventually(const std::function<bool()>& condition) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > limit) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

std::vector<std::string> read_words(const std::filesystem::path& file) {
  std::ifstream stream(file);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

std::vector<pid_t> ids_in(const std::filesystem::path& file) {
  std::vector<pid_t> ids;
  for (const std::string& word : read_words(file)) ids.push_back(std::stoi(word));
  return ids;
}

}  // namespace semitone::test
